// Flows of the Vercel AI SDK: objects by schema, forced tools, tool loops, whole and streamed.
import { createOpenAICompatible } from '@ai-sdk/openai-compatible'
import { Output, generateText, hasToolCall, stepCountIs, streamText, tool } from 'ai'
import { z } from 'zod'

const [url, only = ''] = process.argv.slice(2)
const provider = createOpenAICompatible({
  name: 'causeway', baseURL: url, apiKey: 'none', supportsStructuredOutputs: true, includeUsage: true,
})
const EDGE = 'edge', SCRIPTED = 'scripted'
const ASK_PERSON = 'Ada Lovelace is 36 years old and lives in London. She speaks English.'
const ASK_TREE = 'A file tree: the folder src holds the folder lib and the file main.py; lib holds the file a.py. '
  + 'A file has no children.'
const ASK_ORDER = 'Order 7f1c0b9e-3a52-4f0e-9d0b-2b1f6a4c8d11 of 2026-03-05: 2 apples and 3 pears for 14.50, to be paid '
  + 'by invoice within 30 days. It is new. The shop is at 52.5, 13.4. The share of our stock is 0.25.'
const ASK_WEATHER = 'What is the weather in Paris and in Rome?'
const TEXT = 'Paris has 21 degrees, Rome has 25.'
const settings = { temperature: 0, maxOutputTokens: 300, maxRetries: 0 }

const person = z.object({
  name: z.string().min(1).max(40),
  age: z.int().min(0).max(130),
  language: z.enum(['English', 'Français', 'other "language"']),
  initials: z.string().regex(/^[A-Z]\.[A-Z]\.$/),
  city: z.string().max(40).nullable(),
})
const tree = z.object({ name: z.string().max(20), get children() { return z.array(tree).max(3) } })
const order = z.object({
  id: z.uuid(),
  placed: z.iso.date(),
  total: z.number().nonnegative().multipleOf(0.5),
  payment: z.discriminatedUnion('kind', [
    z.object({ kind: z.literal('card'), lastDigits: z.string().regex(/^\d{4}$/) }),
    z.object({ kind: z.literal('invoice'), days: z.int().multipleOf(10).positive().max(90) }),
  ]),
  quantities: z.record(z.string(), z.int()),
  position: z.tuple([z.number(), z.number()]),
  labels: z.array(z.enum(['new', 'paid', 'sent'])).max(3),
  share: z.number().min(0).max(1),
  mail: z.email().optional(),
})
const report = z.object({ city: z.string(), celsius: z.int() })

const rightPerson = found => [found, found.name === 'Ada Lovelace' && found.age === 36 && found.city === 'London']
const rightTree = found => [found, found.name === 'src']
const rightOrder = found => [found, found.placed === '2026-03-05' && found.payment.kind === 'invoice']
const exact = (found, wanted, calls) => {
  if (JSON.stringify(found) !== JSON.stringify(wanted)) throw new Error(`got ${JSON.stringify(found)}`)
  if (calls && calls.sort().join() !== 'Paris,Rome') throw new Error(`the tool ran for ${calls}`)
  return [found, true]
}
const weather = calls => ({
  get_weather: tool({
    description: 'Get the weather of a city.',
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => { calls.push(city); return city === 'Paris' ? '21 degrees' : '25 degrees' },
  }),
})
const ask = (model, prompt, more = {}) => ({ model: provider(model), prompt, ...settings, ...more })
const save = schema => ({ save: tool({ description: 'Save it.', inputSchema: schema }) })

const flows = [
  [EDGE, 'object', async () =>
    rightPerson((await generateText(ask(EDGE, ASK_PERSON, { output: Output.object({ schema: person }) }))).output)],
  [EDGE, 'object, recursive', async () =>
    rightTree((await generateText(ask(EDGE, ASK_TREE, { output: Output.object({ schema: tree }) }))).output)],
  [EDGE, 'object, formats and unions', async () =>
    rightOrder((await generateText(ask(EDGE, ASK_ORDER, { output: Output.object({ schema: order }) }))).output)],
  [EDGE, 'required tool, formats and unions', async () => {
    const found = await generateText(ask(EDGE, ASK_ORDER, { tools: save(order), toolChoice: 'required' }))
    return rightOrder(order.parse(found.toolCalls[0].input))
  }],
  [EDGE, 'object, streamed in parts', async () => {
    const stream = streamText(ask(EDGE, ASK_PERSON, { output: Output.object({ schema: person }) }))
    let parts = 0
    for await (const _ of stream.partialOutputStream) parts += 1
    if (parts < 2) throw new Error(`${parts} parts`)
    return rightPerson(await stream.output)
  }],
  [EDGE, 'array', async () => {
    const output = Output.array({ element: person })
    const prompt = 'Ada Lovelace is 36 and lives in London. Alan Turing is 41 and lives in Wilmslow.'
    const found = (await generateText(ask(EDGE, prompt, { output }))).output
    return [found, found.map(one => one.age).join() === '36,41']
  }],
  [EDGE, 'choice', async () => {
    const output = Output.choice({ options: ['sunny "day"', 'rain\\snow', 'storm 🌩'] })
    const found = (await generateText(ask(EDGE, 'It pours and there is snow, too.', { output }))).output
    return [found, found === 'rain\\snow']
  }],
  [EDGE, 'required tool', async () => {
    const found = await generateText(ask(EDGE, ASK_PERSON, { tools: save(person), toolChoice: 'required' }))
    return rightPerson(person.parse(found.toolCalls[0].input))
  }],
  [EDGE, 'forced tool, recursive, streamed', async () => {
    const toolChoice = { type: 'tool', toolName: 'save' }
    const stream = streamText(ask(EDGE, ASK_TREE, { tools: save(tree), toolChoice }))
    return rightTree(tree.parse((await stream.toolCalls)[0].input))
  }],
  [SCRIPTED, 'tool loop', async () => {
    const calls = []
    const found = await generateText(ask(SCRIPTED, ASK_WEATHER, { tools: weather(calls), stopWhen: stepCountIs(4) }))
    return exact(found.text, TEXT, calls)
  }],
  [SCRIPTED, 'tool loop, streamed', async () => {
    const calls = []
    const stream = streamText(ask(SCRIPTED, ASK_WEATHER, { tools: weather(calls), stopWhen: stepCountIs(4) }))
    let text = ''
    for await (const piece of stream.textStream) text += piece
    if (!(await stream.totalUsage).totalTokens) throw new Error('no usage')
    return exact(text, TEXT, calls)
  }],
  [SCRIPTED, 'tool loop that ends in a tool without an end', async () => {
    const calls = []
    const tools = { ...weather(calls), ...save(report) }
    const stopWhen = [stepCountIs(4), hasToolCall('save')]
    const found = await generateText(ask(SCRIPTED, ASK_WEATHER, { tools, stopWhen }))
    return exact(found.toolCalls[0].input, { city: 'Paris', celsius: 21 }, calls)
  }],
  [SCRIPTED, 'tool loop with an object as its answer', async () => {
    const calls = []
    const output = Output.object({ schema: report })
    const more = { tools: weather(calls), stopWhen: stepCountIs(4), output }
    return exact((await generateText(ask(SCRIPTED, ASK_WEATHER, more))).output, { city: 'Paris', celsius: 21 }, calls)
  }],
]

for (const [side, name, run] of flows) {
  if (!`${side}: ${name}`.includes(only)) continue
  let row
  try {
    const [found, right] = await run()
    row = { verdict: right ? 'green' : 'weak', found }
  } catch (error) {
    console.error(error)
    row = { verdict: 'failed', found: `${error.name}: ${error.message}` }
  }
  console.log(JSON.stringify({ side, flow: name, ...row }))
}
