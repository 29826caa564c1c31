// The keys a reader typed in: kept in this tab's session storage and nowhere else.

const STORES = { api: "verbatim.api-key", admin: "verbatim.admin-key" };

export function readKey(which) {
  return sessionStorage.getItem(STORES[which]) ?? "";
}

export function keepKey(which, key) {
  if (key) sessionStorage.setItem(STORES[which], key);
  else sessionStorage.removeItem(STORES[which]);
}

export function authorization(key) {
  return key ? { authorization: `Bearer ${key}` } : {};
}

/** Takes the admin key out of the address (`#key=…`), so that it stays in no history and no screenshot. */
export function takeKeyFromAddress() {
  const match = /^#key=(.+)$/.exec(location.hash);
  if (!match) return;
  history.replaceState(null, "", `${location.pathname}${location.search}#playground`);
  let key = match[1];
  try {
    key = decodeURIComponent(key);
  } catch {
    // Not percent-encoded, then: it is the key as it stands.
  }
  keepKey("admin", key);
}
