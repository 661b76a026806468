// The switch of an alias: a person confirms what changes and types a token, which is kept nowhere.
import { made, show, texts } from "/dom.js";

const by = (id) => document.getElementById(id);
const cells = new Map(); // the buttons of each instance, by its id
let shown = null; // the newest status
let asked = null; // { alias, instance, expected } of the open dialog
let switched = async () => {};

const named = (status, alias) => {
  const id = status.aliases[alias];
  if (id !== undefined) return status.instances.find((instance) => instance.id === id);
  // Without an alias, the name of a model means its newest instance.
  return status.instances.findLast((instance) => instance.model === alias);
};

// Return a node with what can be switched to this instance: buttons, or the command.
export function switches(status, instance) {
  shown = status;
  const ofModel = Object.keys(status.aliases).filter((alias) => named(status, alias)?.model === instance.model);
  const aliases = [...new Set([instance.model, ...ofModel])].filter((alias) => named(status, alias)?.id !== instance.id);
  if (!cells.has(instance.id)) cells.set(instance.id, made("span"));
  const cell = cells.get(instance.id);
  const isBack = (alias) => status.previous_of_aliases[alias] === instance.id;
  const make = (alias) => {
    if (!status.can_switch) return made("code");
    const button = made("button", { type: "button" });
    button.addEventListener("click", () => ask(alias, instance.id));
    return button;
  };
  show(cell, aliases, make, (node, alias) => {
    const name = alias === instance.model ? "" : ` --name ${alias}`;
    const text = status.can_switch
      ? `Switch ${alias} ${isBack(alias) ? "back " : ""}to ${instance.name}`
      : `petps alias POOL ${instance.name}${name}`;
    texts(node, text);
  });
  return cell;
}

function detail(instance) {
  const rows = shown.tables
    .filter((table) => table.instance === instance.name)
    .reduce((sum, table) => sum + table.rows, 0);
  return `${instance.name} (version ${instance.applied_version}, run ${instance.run}, ${rows.toLocaleString("en")} rows)`;
}

function ask(alias, id) {
  const instance = shown.instances.find((entry) => entry.id === id);
  const before = named(shown, alias);
  if (!instance || !before) return;
  asked = { alias, instance: instance.name, expected: before.name };
  texts(by("switch-title"), `Switch ${alias} to ${instance.name}?`);
  by("switch-what").replaceChildren(
    made("p", {}, [`${alias} will name ${detail(instance)} instead of ${detail(before)}.`]),
    made("p", {}, [
      `Clients that pull from ${alias} get rows of ${instance.name} within seconds. ${before.name} takes no more ` +
        "changes from the log, and stays until it is dropped, so that you can switch back.",
    ]),
  );
  texts(by("switch-error"), "");
  by("switch").showModal();
  by("token").focus();
}

async function confirm() {
  const token = by("token").value.trim();
  if (!token) {
    texts(by("switch-error"), "Type a token first.");
    by("token").focus();
    return;
  }
  by("switch-confirm").disabled = true;
  texts(by("switch-error"), "");
  try {
    const reply = await fetch("/switch", {
      method: "POST",
      headers: { "Content-Type": "application/json", Authorization: `Bearer ${token}` },
      body: JSON.stringify(asked),
      signal: AbortSignal.timeout(30000),
    });
    if (!reply.ok) throw new Error(`Nothing was switched: ${(await reply.text()).trim() || reply.statusText}`);
    const report = await reply.json();
    by("switch").close();
    texts(by("switched"), `${report.alias} names ${report.instance} now, before ${report.before}.`);
    await switched();
  } catch (error) {
    const isUnknown = error instanceof TypeError || error.name === "TimeoutError";
    texts(
      by("switch-error"),
      isUnknown ? "The server did not answer, so it is not known whether it switched: look at the table." : error.message,
    );
  } finally {
    by("switch-confirm").disabled = false;
  }
}

// Bind the dialog; `after` runs once an alias was switched.
export function bindSwitch(after) {
  switched = after;
  by("switch-cancel").addEventListener("click", () => by("switch").close());
  by("switch-confirm").addEventListener("click", confirm);
  by("token").addEventListener("keydown", (event) => {
    if (event.key === "Enter") confirm();
  });
  by("switch").addEventListener("close", () => {
    by("token").value = "";
    asked = null;
  });
}
