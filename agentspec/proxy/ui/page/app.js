// The shell: asks for a key where one is needed, and shows the view that the address names.

import { getJson, key } from "./api.js";
import { h } from "./dom.js";
import * as cache from "./views/cache.js";
import * as now from "./views/now.js";
import * as playground from "./views/playground.js";
import * as runs from "./views/runs.js";
import * as workflows from "./views/workflows.js";

const views = { playground, now, workflows, runs, cache }; // in the order of the navigation

const main = document.querySelector("main");
const nav = document.querySelector("nav");
let session = null;
let leaving = new AbortController();

const permitted = () => Object.entries(views).filter(([, view]) => !view.needs || session[view.needs]);

async function begin() {
  try {
    session = await getJson("/ui/data/session");
  } catch (error) {
    return error.status === 401 ? login(key.get() ? "This key is not known here." : "") : fail(error);
  }
  await show();
}

async function show() {
  if (!session) return;
  leaving.abort();
  leaving = new AbortController();
  const { signal } = leaving;
  const [, name, ...rest] = decodeURIComponent(location.hash).split("/");
  const known = Object.fromEntries(permitted());
  const chosen = known[name] ? name : Object.keys(known)[0];
  nav.replaceChildren(
    ...permitted().map(([one, view]) => h("a", { href: `#/${one}`, "aria-current": one === chosen && "page" }, view.title)),
    key.get() ? h("button", { type: "button", onclick: leave }, "Sign out") : "",
  );
  document.title = `${known[chosen].title} · agentspec`;
  main.replaceChildren();
  try {
    await known[chosen].show(main, { path: rest.join("/"), session, signal });
  } catch (error) {
    if (!signal.aborted) error.status === 401 ? begin() : fail(error);
  }
}

function fail(error) {
  main.append(h("p", { role: "alert", class: "panel bad" }, error.message));
}

function leave() {
  key.clear();
  leaving.abort();
  begin();
}

function login(message) {
  session = null;
  nav.replaceChildren();
  const field = h("input", { type: "password", id: "key", autocomplete: "off", required: true });
  const enter = (event) => {
    event.preventDefault();
    key.set(field.value.trim());
    begin();
  };
  main.replaceChildren(
    h("form", { class: "panel login", onsubmit: enter },
      h("h1", {}, "API key"),
      h("label", { for: "key" }, "A key of this gateway. It stays in this tab until it is closed."),
      field,
      message && h("p", { role: "alert", class: "bad" }, message),
      h("button", { type: "submit" }, "Open")),
  );
  field.focus();
}

addEventListener("hashchange", async () => {
  await show();
  main.focus();
});
begin();
