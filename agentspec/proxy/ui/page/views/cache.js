// What the token cache holds, and the deletion of it.

import { getJson } from "../api.js";
import { ago, bytes, count, h, percent, table } from "../dom.js";

export const title = "Cache";

const share = (part, whole) => (whole ? percent(part / whole) : "–");

export async function show(main, { session, signal }) {
  const content = h("div", {});
  const said = h("p", { role: "status" });
  const load = async () => content.replaceChildren(...holdings(await getJson("/ui/data/cache", { signal }), session, forget));
  const forget = async (tenant) => {
    const chosen = await confirmed(tenant, session);
    if (!chosen) return;
    said.textContent = "Forgetting…";
    try {
      const { forgotten, erasure_pending: pending } = await getJson("/ui/data/cache/forget", { method: "POST", body: chosen });
      said.textContent = `Forgot ${count(forgotten)} cached answers.${pending ? " Their bytes are still being erased from the files." : ""}`;
      await load();
    } catch (error) {
      said.textContent = `Nothing was forgotten: ${error.message}`;
    }
  };
  main.append(h("h1", {}, title), said, content);
  await load();
}

function holdings({ index, namespaces, disk }, session, forget) {
  const own = session.reads_metrics ? [] : [session.tenant];
  const tenants = [...new Set([...own, ...namespaces.map((one) => one.tenant), ...Object.keys(disk)])];
  const of = (tenant) => namespaces.filter((one) => one.tenant === tenant);
  const total = (tenant, name) => of(tenant).reduce((sum, one) => sum + one[name], 0);
  const byTenant = tenants.map((tenant) => [
    tenant, count(total(tenant, "sequences")), bytes(total(tenant, "memory_bytes")), disk[tenant] ? bytes(disk[tenant]) : "–",
    h("button", { type: "button", "aria-label": `Forget of ${tenant}`, onclick: () => forget(tenant) }, "Forget…"),
  ]);
  const byNamespace = namespaces.map((one) => [
    one.tenant, one.model || "–", h("code", {}, one.namespace), count(one.sequences), count(one.tokens), count(one.sessions),
    bytes(one.memory_bytes), one.newest ? ago(one.newest) : "–", one.oldest ? ago(one.oldest) : "–",
    share(one.hits, one.steps), share(one.accepted, one.drafted),
  ]);
  return [
    h("section", { class: "panel" },
      table(["Tenant", "Answers", "Memory", "On disk", "Deletion"], byTenant, "By tenant"),
      session.reads_metrics && h("p", {}, h("button", { type: "button", onclick: () => forget("") }, "Forget of any tenant…"))),
    h("section", { class: "panel" },
      byNamespace.length
        ? table(["Tenant", "Model", "Namespace", "Answers", "Tokens", "Sessions", "Memory", "Newest", "Oldest", "Steps with a hit", "Drafts accepted"],
            byNamespace, "By namespace, in memory")
        : h("p", {}, index ? "Nothing is in memory yet." : "No model of this gateway drafts from a cache in this process.")),
    h("p", { class: "muted" }, "A namespace is a tenant's part for one model. Hits and drafts count since it was loaded."),
  ];
}

// What to forget, once it is confirmed; null if it is not.
function confirmed(tenant, session) {
  const field = (label, attributes) => {
    const input = h("input", { autocomplete: "off", ...attributes });
    return [input, h("p", {}, h("label", {}, label, h("br", {}), input))];
  };
  const [ofTenant, tenantField] = field("Tenant (empty: all)", { value: tenant });
  const [ofSession, sessionField] = field("Only this session (empty: all)", {});
  const [older, olderField] = field("Only what is older than, such as 30d or 12h", { pattern: "\\s*[0-9]+(\\.[0-9]+)?\\s*[smhdw]?\\s*" });
  const dialog = h("dialog", { "aria-labelledby": "forget" },
    h("form", { method: "dialog" },
      h("h2", { id: "forget" }, tenant ? `Forget what ${tenant} wrote?` : "Forget what tenants wrote?"),
      session.reads_metrics && tenantField, sessionField, olderField,
      h("p", {}, "It goes from memory and disk, for good, and from every server that shares the cache."),
      h("p", { class: "row" },
        h("button", { type: "button", onclick: () => dialog.close("") }, "Cancel"), h("button", { type: "submit", value: "forget", class: "danger" }, "Forget"))));
  document.body.append(dialog);
  dialog.showModal();
  return new Promise((done) => {
    dialog.addEventListener("close", () => {
      const given = { tenant: ofTenant.value.trim(), session: ofSession.value.trim(), older_than: older.value.trim() };
      dialog.remove();
      const chosen = Object.fromEntries(Object.entries(given).filter(([, value]) => value));
      done(dialog.returnValue === "forget" ? chosen : null);
    });
  });
}
