// Keeps the server busy with other requests while answers are compared: their number changes all the time, because it
// is the change of company that changes bits.
//
// A browser opens few connections to one server, so many completions travel in one request, as a list of prompts.

import { answered } from "./ask.js";
import { authorization } from "./keys.js";

const SUBJECTS = [
  "The history of the printing press began",
  "A recipe for bread starts with",
  "The three laws of motion are",
  "def fibonacci(n):",
  "Once upon a time, in a village by the sea,",
  "The capital cities of South America are",
  "To repair a bicycle tyre, first",
  "Dear Sir or Madam,",
  "Photosynthesis is the process by which",
  "The difference between a cat and a dog is",
  "In the year 1492",
  "SELECT name FROM customers WHERE",
  "My favourite season is autumn, because",
  "A prime number is",
  "The orchestra tuned, and then",
  "Five things to do on a rainy day:",
];
const MOST_TOKENS = 32;
const PAUSE_MS = 1000;
const PATIENCE = 3;

/** Send until `signal` is raised; `onTrouble` hears once why it gave up. Never rejects. */
export async function keepBusy({ model, most, key, signal }, onTrouble) {
  let failures = 0;
  while (most > 0 && !signal.aborted) {
    const count = 1 + Math.floor(Math.random() * most);
    const body = {
      model,
      prompt: Array.from({ length: count }, () => SUBJECTS[Math.floor(Math.random() * SUBJECTS.length)]),
      max_tokens: 4 + Math.floor(Math.random() * (MOST_TOKENS - 4)),
      temperature: 1,
    };
    const headers = { "content-type": "application/json", ...authorization(key) };
    try {
      const response = await answered(
        fetch("v1/completions", { method: "POST", headers, body: JSON.stringify(body), signal }),
      );
      await response.arrayBuffer();
      failures = 0;
    } catch (error) {
      if (signal.aborted) return;
      failures += 1;
      if (failures === PATIENCE) {
        onTrouble(error.message);
        return;
      }
      await new Promise((resolve) => setTimeout(resolve, PAUSE_MS));
    }
  }
}
