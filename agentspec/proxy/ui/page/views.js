// The views of the page, in the order of the navigation.

import * as playground from "./views/playground.js";

export const views = { playground };
