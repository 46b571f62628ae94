// The views of the page, in the order of the navigation.

import * as cache from "./views/cache.js";
import * as now from "./views/now.js";
import * as playground from "./views/playground.js";
import * as runs from "./views/runs.js";
import * as workflows from "./views/workflows.js";

export const views = { playground, now, workflows, runs, cache };
