// Writes zod.json: `node tests/models/constraints/schemas/generate.mjs` in a folder with zod 4 (npm install zod@4).
import { writeFileSync } from "node:fs";
import { z } from "zod";

const person = z.object({ name: z.string(), age: z.int().min(0).max(150) });
const tree = z.object({
  name: z.string(),
  get children() {
    return z.array(tree);
  },
});
const models = {
  person,
  tree,
  strict: z.strictObject({ a: z.number(), b: z.boolean() }),
  loose: z.looseObject({ a: z.number() }),
  optional: z.object({ a: z.string().optional(), b: z.string().nullable(), c: z.string().nullish() }),
  defaulted: z.object({ limit: z.int().default(10) }),
  enumerated: z.object({ colour: z.enum(["red", "green"]), level: z.literal([1, 2, 3]) }),
  union: z.object({ value: z.union([z.string(), z.number(), z.null()]) }),
  discriminated: z.discriminatedUnion("kind", [
    z.object({ kind: z.literal("a"), n: z.number() }),
    z.object({ kind: z.literal("b"), t: z.string() }),
  ]),
  strings: z.object({ code: z.string().regex(/^[A-Z]{3}\d+$/), short: z.string().min(1).max(5), start: z.string().startsWith("x-") }),
  formats: z.object({ mail: z.email(), id: z.uuid(), site: z.url(), at: z.iso.datetime(), day: z.iso.date(), four: z.ipv4() }),
  numbers: z.object({ share: z.number().min(0).max(1), above: z.number().gt(0), step: z.number().multipleOf(5) }),
  tuple: z.object({ pair: z.tuple([z.string(), z.number()]), more: z.tuple([z.string()]).rest(z.number()) }),
  record: z.object({ counts: z.record(z.string(), z.int()) }),
  keyed: z.object({ by: z.record(z.enum(["a", "b"]), z.number()) }),
  arrays: z.object({ few: z.array(z.string()).min(1).max(3), all: z.array(person) }),
  intersection: z.intersection(z.object({ a: z.string() }), z.object({ b: z.number() })),
  extended: person.extend({ email: z.email().optional() }),
  described: z.object({ why: z.string().describe("One sentence"), any: z.unknown() }).meta({ title: "Described" }),
  steps: z.object({ steps: z.array(z.object({ explanation: z.string(), output: z.string() })), final_answer: z.string() }),
};
const schemas = Object.fromEntries(Object.entries(models).map(([name, model]) => [name, z.toJSONSchema(model)]));
writeFileSync("zod.json", JSON.stringify(schemas, null, 1) + "\n");
