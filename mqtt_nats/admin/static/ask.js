// SPDX-License-Identifier: Apache-2.0
// Questions to the gateway, and the token where one is needed: it is forgotten with the browser's tab.

import { Refused, dialog, make } from "/parts.js";

const GIVEN = "#token=";

// The address that the gateway prints has the token in its fragment: it does not stay in the address, nor in the history.
function takeToken() {
  if (!location.hash.startsWith(GIVEN)) return false;
  sessionStorage.setItem("token", location.hash.slice(GIVEN.length));
  history.replaceState(null, "", location.pathname);
  return true;
}

takeToken();
addEventListener("hashchange", () => { if (takeToken()) location.reload(); });

export const token = () => sessionStorage.getItem("token") ?? "";

export async function fetched(method, path, values, signal) {
  const headers = token() ? { Authorization: `Bearer ${token()}` } : {};
  let url = path;
  let body;
  if (method === "POST") {
    body = JSON.stringify(values);
    headers["Content-Type"] = "application/json";
  } else {
    const query = new URLSearchParams();
    for (const [name, value] of Object.entries(values)) {
      if (value !== "" && value !== false && value !== undefined) query.append(name, value);
    }
    if (query.size) url += `?${query}`;
  }
  return fetch(url, { method, headers, body, credentials: "same-origin", redirect: "error", signal });
}

export async function ask(method, path, values = {}, root = "/api/v1") {
  for (;;) {
    const answer = await fetched(method, root + path, values);
    if (answer.status === 401) {
      await signIn(true);
      continue;
    }
    const found = await answer.json().catch(() => ({ error: `status ${answer.status}` }));
    if (!answer.ok) throw new Refused(found.error);
    return found;
  }
}

let asking = null;

// Ask for the token, once, until it is right.
export function signIn(wrong = false) {
  asking ??= (async () => {
    let first = !wrong;
    for (;;) {
      const answer = await fetched("GET", "/about", {});
      if (answer.status !== 401) break;
      await form(first && !token() ? "" : "That is not the token.");
      first = false;
    }
  })().finally(() => { asking = null; });
  return asking;
}

function form(text) {
  return new Promise((done) => {
    const input = make("input", { type: "password", name: "token", autocomplete: "current-password", required: "" });
    const enter = make("button", { type: "submit" }, "Enter");
    const filled = make("form", {},
      make("label", {}, "Token of the gateway (admin_token) ", input), make("p", { class: "muted" }, text),
      make("div", { class: "bar" }, enter));
    const shown = dialog("Sign in", [filled], null);
    input.focus();
    shown.addEventListener("cancel", (event) => event.preventDefault());
    filled.addEventListener("submit", (event) => {
      event.preventDefault();
      sessionStorage.setItem("token", input.value);
      shown.close();
      done();
    });
  });
}
