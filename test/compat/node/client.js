'use strict'
// Sends calls with the vendor's Node client and prints their results: one
// line of JSON {id, error} per call.
//
//   node client.js <endpoint> <writeKey> showcase
//   node client.js <endpoint> <writeKey> many <calls> <batch>

const { Analytics } = require('@segment/analytics-node')
const { many } = require('./calls')

const [host, writeKey, what, calls, batch] = process.argv.slice(2)

// Returns a call of every type, with each field that the client accepts.
function showcase () {
  const past = new Date('2020-02-29T17:30:15.250Z')
  const context = {
    app: { name: 'Shop', version: '1.2' }, ip: '203.0.113.7', locale: 'de-AT', timezone: 'Europe/Vienna',
    page: { url: 'https://shop.example/?a=1&b=<2>', path: '/', title: 'Home' }, traits: { email: 'a@example.com' }, active: true
  }
  return [
    ['identify', {
      messageId: 'node-identify', userId: 'u1', timestamp: past, context,
      traits: { name: 'Ünal <b> & \u2028 "q" 😀', lone: '\ud800', createdAt: past, b: 1, 10: 'ten', 2: 'two', tags: ['a', , 'c'], age: 41.0, none: null, gone: undefined },
      integrations: { All: true, Other: false, Webhooks: { mode: 'x' } }
    }],
    ['track', {
      messageId: 'node-track', userId: 'u1', anonymousId: 'a1', event: 'Order Completed',
      properties: { revenue: 99.5, total: 1e21, small: 3e-7, zero: -0, third: 1 / 3, big: 2 ** 53, nested: { b: 1, a: [1, -0.5, 'x', null, true, {}] }, '': 'empty key' }
    }],
    ['page', { messageId: 'node-page', anonymousId: 'a1', category: 'Docs', name: 'Home', properties: { url: 'https://shop.example/', path: '/', referrer: '', title: 'Home' } }],
    ['screen', { messageId: 'node-screen', userId: 'u1', name: 'Cart', properties: { value: 3 } }],
    ['group', { messageId: 'node-group', userId: 'u1', groupId: 'acme', traits: { name: 'Acme', employees: 420 } }],
    ['alias', { messageId: 'node-alias', userId: 'u1', previousId: 'a1' }],
    // It excludes the destination.
    ['track', { messageId: 'node-elsewhere', userId: 'u1', event: 'E', integrations: { All: false, Other: true } }],
    // The client adds the missing fields.
    ['track', { userId: 'u1', event: 'Minimal', timestamp: '2020-02-29T12:30:15-05:00' }],
    ['identify', { userId: 'u1' }]
  ]
}

async function main () {
  const list = what === 'showcase' ? showcase() : many('node', Number(calls))
  const analytics = new Analytics({
    host, writeKey,
    flushAt: what === 'showcase' ? list.length : Number(batch),
    flushInterval: 60_000 // Requests are full batches, even on a slow machine.
  })
  analytics.on('error', () => {}) // The callbacks report errors too.
  await Promise.all(list.map(([kind, call]) => new Promise((resolve) => {
    analytics[kind](call, (error, context) => {
      console.log(JSON.stringify({ id: context.event.messageId, error: error && String(error.reason ?? error) }))
      resolve()
    })
  })))
  await analytics.closeAndFlush()
}

main().catch((error) => { console.error(error); process.exit(1) })
