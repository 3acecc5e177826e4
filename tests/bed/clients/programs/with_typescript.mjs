// Flows of the official clients for TypeScript and of the AI SDK's providers, at the edge: objects by schema, forced
// tools and a free choice of tools, in chats, responses and messages.
import { createAnthropic } from '@ai-sdk/anthropic'
import { createOpenAI } from '@ai-sdk/openai'
import Anthropic from '@anthropic-ai/sdk'
import { betaZodTool } from '@anthropic-ai/sdk/helpers/beta/zod'
import { zodOutputFormat } from '@anthropic-ai/sdk/helpers/zod'
import { Output, generateText, stepCountIs, streamText, tool } from 'ai'
import OpenAI from 'openai'
import { zodResponseFormat, zodTextFormat } from 'openai/helpers/zod'
import { z } from 'zod'

const [url, only = ''] = process.argv.slice(2)
const EDGE = 'edge'
const ASK_PERSON = 'Ada Lovelace is 36 years old and lives in London. She speaks English.'
const ASK_ORDER = 'An order of 2026-03-05: 2 apples and 3 pears for 14.50, to be paid by invoice within 30 days. It is new.'
const ASK_WEATHER = 'What is the weather in Paris? Use the tool.'
const timeout = 600_000
const openai = new OpenAI({ baseURL: url, apiKey: 'none', maxRetries: 0, timeout })
const anthropic = new Anthropic({ baseURL: url.replace(/\/v1$/, ''), apiKey: 'none', maxRetries: 0, timeout })
const ai = {
  chats: createOpenAI({ baseURL: url, apiKey: 'none' }).chat(EDGE),
  responses: createOpenAI({ baseURL: url, apiKey: 'none' }).responses(EDGE),
  messages: createAnthropic({ baseURL: url, apiKey: 'none' })(EDGE),
}
const settings = { temperature: 0, maxOutputTokens: 300, maxRetries: 0, providerOptions: { openai: { store: false } } }

const person = z.object({
  name: z.string(), age: z.int(), language: z.enum(['English', 'Français', 'other "language"']), city: z.string().nullable(),
})
const order = z.object({
  placed: z.iso.date(),
  total: z.number(),
  payment: z.enum(['card', 'invoice']),
  items: z.array(z.object({ name: z.string(), count: z.int() })),
})
const rightPerson = found => {
  person.parse(found)
  return [found, found.name === 'Ada Lovelace' && found.age === 36 && found.city === 'London']
}
const rightOrder = found => {
  order.parse(found)
  return [found, found.placed === '2026-03-05' && found.payment === 'invoice' && found.total === 14.5]
}
const user = content => [{ role: 'user', content }]
const message = { model: EDGE, max_tokens: 300, temperature: 0 }
const save = schema => ({ save: tool({ description: 'Save it.', inputSchema: schema }) })
const city = z.object({ city: z.string() })

const flows = [
  ['openai chats: parse', async () => {
    const response_format = zodResponseFormat(person, 'person')
    const found = await openai.chat.completions.parse({ ...message, messages: user(ASK_PERSON), response_format })
    return rightPerson(found.choices[0].message.parsed)
  }],
  ['openai responses: parse', async () => {
    const text = { format: zodTextFormat(order, 'order') }
    const { output_parsed } = await openai.responses.parse({ model: EDGE, input: ASK_ORDER, temperature: 0, text })
    return rightOrder(output_parsed)
  }],
  ['openai responses: forced function, in the background', async () => {
    const parameters = { type: 'object', properties: { city: { type: 'string' } }, required: ['city'], additionalProperties: false }
    const tools = [{ type: 'function', name: 'get_weather', parameters, strict: true }]
    const tool_choice = { type: 'function', name: 'get_weather' }
    let made = await openai.responses.create({ model: EDGE, input: ASK_WEATHER, tools, tool_choice, background: true })
    for await (const event of await openai.responses.retrieve(made.id, { stream: true })) made = event.response ?? made
    const found = JSON.parse(made.output.find(item => item.type === 'function_call').arguments)
    return [found, city.parse(found).city === 'Paris']
  }],
  ['anthropic: parse', async () => {
    const output_config = { format: zodOutputFormat(person) }
    return rightPerson((await anthropic.messages.parse({ ...message, messages: user(ASK_PERSON), output_config })).parsed_output)
  }],
  ['anthropic: forced tool, streamed', async () => {
    const tools = [{ name: 'save', input_schema: z.toJSONSchema(order) }]
    const tool_choice = { type: 'tool', name: 'save' }
    const found = await anthropic.messages.stream({ ...message, messages: user(ASK_ORDER), tools, tool_choice }).finalMessage()
    return rightOrder(found.content.find(block => block.type === 'tool_use').input)
  }],
  ['anthropic: count_tokens is the prompt of the answer', async () => {
    const counted = await anthropic.messages.countTokens({ model: EDGE, messages: user(ASK_PERSON) })
    const { usage } = await anthropic.messages.create({ ...message, max_tokens: 1, messages: user(ASK_PERSON) })
    const prompt = usage.input_tokens + usage.cache_read_input_tokens
    if (counted.input_tokens !== prompt) throw new Error(`counted ${counted.input_tokens}, prompt ${prompt}`)
    return [prompt, true]
  }],
  ['anthropic: tool runner, free to choose', async () => {
    const calls = []
    const run = async input => { calls.push(input.city); return '21 degrees' }
    const tools = [betaZodTool({ name: 'get_weather', description: 'Get the weather of a city.', inputSchema: city, run })]
    const runner = anthropic.beta.messages.toolRunner({ ...message, messages: user(ASK_WEATHER), tools, max_iterations: 4 })
    const last = await runner.runUntilDone()
    const text = last.content.map(block => block.text ?? '').join('')
    return [{ calls, text, stop: last.stop_reason }, calls.join() === 'Paris' && text.includes('21')]
  }],
  ...Object.entries(ai).flatMap(([kind, model]) => [
    [`ai ${kind}: object`, async () => {
      const output = Output.object({ schema: person })
      return rightPerson((await generateText({ ...settings, model, prompt: ASK_PERSON, output })).output)
    }],
    [`ai ${kind}: object, streamed`, async () => {
      const stream = streamText({ ...settings, model, prompt: ASK_ORDER, output: Output.object({ schema: order }) })
      for await (const _ of stream.partialOutputStream);
      return rightOrder(await stream.output)
    }],
    [`ai ${kind}: required tool`, async () => {
      const found = await generateText({ ...settings, model, prompt: ASK_ORDER, tools: save(order), toolChoice: 'required' })
      return rightOrder(found.toolCalls[0].input)
    }],
    [`ai ${kind}: tool, free to choose`, async () => {
      const calls = []
      const execute = async input => { calls.push(input.city); return '21 degrees' }
      const tools = { get_weather: tool({ description: 'Get the weather of a city.', inputSchema: city, execute }) }
      const found = await generateText({ ...settings, model, prompt: ASK_WEATHER, tools, stopWhen: stepCountIs(4) })
      return [{ calls, text: found.text }, calls.join() === 'Paris' && found.text.includes('21')]
    }],
  ]),
]

for (const [name, run] of flows) {
  if (!`${EDGE}: ${name}`.includes(only)) continue
  let row
  try {
    const [found, right] = await run()
    row = { verdict: right ? 'green' : 'weak', found }
  } catch (error) {
    console.error(error)
    row = { verdict: 'failed', found: `${error.name}: ${error.message}` }
  }
  console.log(JSON.stringify({ side: EDGE, flow: name, ...row }))
}
