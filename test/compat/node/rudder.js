'use strict'
// Sends calls with RudderStack's Node client and prints their results: one line of JSON
// {id, error} per call.
//
//   node rudder.js <endpoint> <writeKey> showcase
//   node rudder.js <endpoint> <writeKey> many <calls> <batch>

const Analytics = require('@rudderstack/rudder-sdk-node')
const { many } = require('./calls')

const [host, writeKey, what, calls, batch] = process.argv.slice(2)

// Returns a call of every type.
function showcase () {
  const past = new Date('2020-02-29T17:30:15.250Z')
  const context = { ip: '203.0.113.7', locale: 'de-AT', traits: { email: 'a@example.com' } }
  return [
    ['identify', { messageId: 'rudder-identify', userId: 'u1', timestamp: past, context, traits: { name: 'Ünal <b> & \u2028 😀', createdAt: past, 10: 'ten', 2: 'two', none: null }, integrations: { All: true, Other: false } }],
    ['track', { messageId: 'rudder-track', userId: 'u1', event: 'Order Completed', properties: { revenue: 99.5, total: 1e21, nested: { b: 1, a: [1, 'x', null] } } }],
    ['page', { messageId: 'rudder-page', anonymousId: 'a1', name: 'Home', properties: { url: 'https://shop.example/', path: '/', referrer: '', title: 'Home' } }],
    ['screen', { messageId: 'rudder-screen', userId: 'u1', name: 'Cart', properties: { value: 3 } }],
    ['group', { messageId: 'rudder-group', userId: 'u1', groupId: 'acme', traits: { employees: 420 } }],
    ['alias', { messageId: 'rudder-alias', userId: 'u1', previousId: 'a1' }],
    // It excludes the destination.
    ['track', { messageId: 'rudder-elsewhere', userId: 'u1', event: 'E', integrations: { All: false, Other: true } }],
    // The client adds the missing fields.
    ['track', { userId: 'u1', event: 'Minimal' }]
  ]
}

async function main () {
  const list = what === 'showcase' ? showcase() : many('rudder', Number(calls))
  const client = new Analytics(writeKey, {
    dataPlaneUrl: host, logLevel: 'error', flushInterval: 500, retryCount: 10,
    flushAt: what === 'showcase' ? list.length : Number(batch),
    gzip: what !== 'showcase' // A recording is text.
  })
  await Promise.all(list.map(([kind, call]) => new Promise((resolve) => {
    client[kind](call, (error, data) => {
      // The client's data of compressed requests is bytes.
      const id = call.messageId ?? data?.batch?.at(-1).messageId
      console.log(JSON.stringify({ id, error: error && String(error) }))
      resolve()
    })
  })))
}

main().then(() => process.exit(0))
