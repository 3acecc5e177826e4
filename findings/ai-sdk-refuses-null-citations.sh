#!/bin/sh
# @ai-sdk/anthropic 3.0.140 (npm): a whole message whose text block has `"citations": null` is "Invalid JSON response";
# the same block in a stream is taken.
#
# Guess: Anthropic's own client declares `citations: Array<TextCitation> | null` for a text block (@anthropic-ai/sdk
# 1.14.0, `TextBlock`), so a server may send the null that this type names, and another client of the API takes it.
# Seen: the provider's schema of whole answers has `citations` optional, but not nullable, and the message is refused
# with a status of 200; its schema of streamed blocks does not name the field.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT INT TERM
cd "$folder"
echo '{"private": true, "type": "module"}' > package.json
npm install --silent --no-save --no-audit --no-fund @ai-sdk/anthropic@3.0.140 @anthropic-ai/sdk@1.14.0 zod@4.6.7
cat > seen.mjs <<'PROGRAM'
import assert from 'node:assert/strict'
import { readFileSync } from 'node:fs'
import { createAnthropic } from '@ai-sdk/anthropic'

const declared = readFileSync('node_modules/@anthropic-ai/sdk/resources/messages/messages.d.ts', 'utf8')
assert.match(declared, /interface TextBlock \{[^}]*citations: Array<TextCitation> \| null;/)

const usage = { input_tokens: 1, output_tokens: 1 }
const head = { id: 'msg_1', type: 'message', role: 'assistant', model: 'm', stop_sequence: null, usage }
const prompt = [{ role: 'user', content: [{ type: 'text', text: 'hi' }] }]
const model = body => createAnthropic({ apiKey: 'none', fetch: async () => new Response(...body) })('m')

const whole = async block => {
  const document = { ...head, content: [block], stop_reason: 'end_turn' }
  try {
    const { content } = await model([JSON.stringify(document)]).doGenerate({ prompt })
    return content.map(part => part.text).join('')
  } catch (error) {
    return `${error.name}: ${error.message}`
  }
}
const streamed = async block => {
  const events = [
    { type: 'message_start', message: { ...head, content: [], stop_reason: null } },
    { type: 'content_block_start', index: 0, content_block: { ...block, text: '' } },
    { type: 'content_block_delta', index: 0, delta: { type: 'text_delta', text: block.text } },
    { type: 'content_block_stop', index: 0 },
    { type: 'message_delta', delta: { stop_reason: 'end_turn', stop_sequence: null }, usage },
    { type: 'message_stop' },
  ]
  const text = events.map(event => `event: ${event.type}\ndata: ${JSON.stringify(event)}\n\n`).join('')
  const { stream } = await model([text, { headers: { 'content-type': 'text/event-stream' } }]).doStream({ prompt })
  let found = ''
  for await (const part of stream) found += part.type === 'text-delta' ? part.delta : part.type === 'error' ? part.error : ''
  return found
}
const bare = { type: 'text', text: 'Good day.' }
const seen = [await whole(bare), await whole({ ...bare, citations: null }), await streamed({ ...bare, citations: null })]
console.log(seen.join('\n'))
assert.deepEqual(seen, ['Good day.', 'AI_APICallError: Invalid JSON response', 'Good day.'])
PROGRAM
node seen.mjs
