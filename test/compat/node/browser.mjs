// Sends calls with the vendor's browser client in a DOM that applies the browsers' rules for
// cross-origin requests (preflight, mixed content, readable headers). Prints one line of
// JSON {id} per acknowledged call.
//
//   node browser.mjs <endpoint> <writeKey> <origin> showcase
//   node browser.mjs <endpoint> <writeKey> <origin> many <calls> <batch>

import { createRequire } from 'node:module'
import { Window } from 'happy-dom'

const [host, writeKey, origin, what, calls, batch] = process.argv.slice(2)

const window = new Window({
  url: origin + '/cart?x=1',
  settings: { navigator: { userAgent: 'Mozilla/5.0 (X11; Linux x86_64) HappyDOM' } }
})
const sent = new Set()
const acknowledged = new Set()
const waiting = new Map() // id -> resolve function

// The page's fetch, which records the acknowledged calls: the client does not report them,
// because it retries in the background.
async function fetch (url, init) {
  const body = JSON.parse(init.body)
  const ids = (body.batch ?? [body]).map((call) => call.messageId)
  const response = await window.fetch(url, init)
  if (response.ok) {
    for (const id of ids) {
      if (acknowledged.has(id)) continue
      acknowledged.add(id)
      console.log(JSON.stringify({ id }))
      waiting.get(id)?.()
    }
  }
  return response
}
window.fetch = window.fetch.bind(window)
const globals = { window, self: window, fetch }
for (const name of ['document', 'location', 'navigator', 'localStorage', 'sessionStorage', 'Element', 'HTMLElement', 'Event', 'CustomEvent']) globals[name] = window[name]
for (const [name, value] of Object.entries(globals)) Object.defineProperty(globalThis, name, { value, configurable: true, writable: true })

const { AnalyticsBrowser } = createRequire(import.meta.url)('@segment/analytics-next')

// Loads the client with settings that the vendor's site would send; deliveryStrategy configures batches.
async function load (deliveryStrategy) {
  const apiHost = new URL(host).host + '/v1'
  const settings = { integrations: { 'Segment.io': { apiKey: writeKey, apiHost, protocol: 'http', deliveryStrategy } } }
  const [analytics] = await AnalyticsBrowser.load({ writeKey, cdnSettings: settings }, { disableClientPersistence: true })
  return analytics
}

// Waits until the call of a context is acknowledged.
async function done (context) {
  const id = (await context).event.messageId
  sent.add(id)
  if (!acknowledged.has(id)) await new Promise((resolve) => waiting.set(id, resolve))
}

async function showcase () {
  const analytics = await load()
  analytics.setAnonymousId('a1')
  await done(analytics.page('Docs', 'Home', { title: 'Home <1>' }))
  await done(analytics.track('Order Completed', { revenue: 99.5, total: 1e21, 10: 'ten', 2: 'two', name: 'Ünal & \u2028 😀', none: null, gone: undefined }))
  await done(analytics.identify('u1', { email: 'a@example.com', createdAt: new Date('2020-02-29T17:30:15.250Z') }, { integrations: { All: true, Other: false } }))
  await done(analytics.screen('Cart', { value: 3 }))
  await done(analytics.group('acme', { employees: 420 }))
  await done(analytics.alias('u1', 'a1'))
  // Batches: pending calls are sent when the user leaves the page.
  const batching = await load({ strategy: 'batching', config: { size: 10, timeout: 600_000 } })
  batching.setAnonymousId('a2')
  const left = [await batching.track('Clicked'), await batching.track('Left')]
  window.dispatchEvent(new window.Event('pagehide'))
  await Promise.all(left.map(done))
}

async function many () {
  const analytics = await load({ strategy: 'batching', config: { size: Number(batch), timeout: 1000 } })
  const kinds = [
    (n) => analytics.identify('u1', { n }),
    (n) => analytics.track('E', { n }),
    () => analytics.page('Home'),
    () => analytics.screen('Cart'),
    () => analytics.group('acme'),
    () => analytics.alias('u1', 'a1')
  ]
  await Promise.all(Array.from({ length: Number(calls) }, (_, n) => done(kinds[n % kinds.length](n))))
}

await (what === 'showcase' ? showcase() : many())
await window.happyDOM.abort()
process.exit(0)
