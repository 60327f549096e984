
// Conversations in the browser's database. Without one they last as long as the page. The page's
// other tabs receive what one tab changes.
//
// A conversation: {id, title, updated, model, skipped, turns}. `skipped`: oldest turns that are no
// longer sent. A turn: {question: {text, files, pictures}, answers, shown}.

class Store {
  // `receive` gets conversations that other tabs change, {id} of those that they delete, and null
  // from a tab that asks for those that are being answered.

  /** Open the database. Pages of other paths of this host have others. */
  static async open(receive) {
    const store = new Store();
    const name = `tk:${location.pathname}`;
    store.tabs = new BroadcastChannel(name);
    store.tabs.onmessage = ({ data }) => receive(data);
    try {
      const opening = indexedDB.open(name, 1);
      opening.onupgradeneeded = () =>
        opening.result.createObjectStore("conversations", { keyPath: "id" });
      store.database = await done(opening);
    } catch {
      store.database = null;
    }
    return store;
  }

  get isKept() {
    return this.database !== null;
  }

  /** Return all conversations, the newest first. */
  async all() {
    const found = this.isKept ? await done(this.access("readonly").getAll()) : [];
    return found.sort((a, b) => b.updated - a.updated);
  }

  async put(conversation) {
    this.tabs.postMessage(conversation);
    if (this.isKept) await done(this.access("readwrite").put(conversation));
  }

  async remove(id) {
    this.tabs.postMessage({ id });
    if (this.isKept) await done(this.access("readwrite").delete(id));
  }

  access(mode) {
    return this.database.transaction("conversations", mode).objectStore("conversations");
  }
}

function done(request) {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

const memory = new Map(); // stands in for storage that the browser refuses

/** Read a value of sessionStorage or localStorage. */
function readStorage(storage, name, otherwise) {
  try {
    otherwise = JSON.parse(window[storage].getItem(name)) ?? otherwise;
  } catch {
    // The value, if there is one, is in memory.
  }
  return memory.get(name) ?? otherwise;
}

function writeStorage(storage, name, value) {
  try {
    window[storage].setItem(name, JSON.stringify(value));
  } catch {
    memory.set(name, value);
  }
}
