// Calls of the gateway, with the key that this tab was given.

const ROOT = new URL("../", import.meta.url);
const KEY = "agentspec.key";

export const key = {
  get: () => sessionStorage.getItem(KEY),
  set: (value) => sessionStorage.setItem(KEY, value),
  clear: () => sessionStorage.removeItem(KEY),
};

async function call(path, { method = "GET", body, headers = {}, signal } = {}) {
  const all = { ...headers };
  if (key.get()) all.authorization = `Bearer ${key.get()}`;
  if (body !== undefined) all["content-type"] = "application/json";
  const sent = body === undefined ? undefined : JSON.stringify(body);
  const response = await fetch(new URL(`.${path}`, ROOT), { method, headers: all, body: sent, signal });
  if (response.ok) return response;
  const found = await response.json().catch(() => ({}));
  const error = new Error(found.error?.message ?? `the gateway answered ${response.status}`);
  throw Object.assign(error, { status: response.status });
}

export const getJson = async (path, options) => (await call(path, options)).json();
export const getText = async (path, options) => (await call(path, options)).text();

// The JSON of each event of a stream, as it comes; a body is posted.
export async function* events(path, options = {}) {
  const response = await call(path, { method: options.body === undefined ? "GET" : "POST", ...options });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (let { done, value } = await reader.read(); !done; { done, value } = await reader.read()) {
      const lines = (rest + value).split("\n");
      rest = lines.pop();
      for (const line of lines) {
        const data = line.startsWith("data:") ? line.slice(5).trim() : "";
        if (data && data !== "[DONE]") yield JSON.parse(data);
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
