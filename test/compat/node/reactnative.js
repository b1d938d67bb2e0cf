'use strict'
// Sends calls with the core of the vendor's React Native client; the modules of React Native are
// replaced by stubs. The client finds the tracking API by its settings document. Prints one line
// of JSON {id} per acknowledged call.
//
//   node reactnative.js <https endpoint> <writeKey> showcase
//   node reactnative.js <https endpoint> <writeKey> many <calls> <batch>

const Module = require('node:module')

const [host, writeKey, what, calls, batch] = process.argv.slice(2)

// What the native part of an app on a phone returns.
const phone = {
  appName: 'Shop', appVersion: '1.2', buildNumber: '3', bundleId: 'example.shop', locale: 'de-AT', networkType: 'wifi',
  osName: 'Android', osVersion: '14', screenHeight: 2400, screenWidth: 1080, screenDensity: 2.6, timezone: 'Europe/Vienna',
  manufacturer: 'Example', model: 'Phone 1', deviceName: 'phone', deviceId: 'device-1', deviceType: 'android'
}
const none = () => {}
const stubs = {
  'react-native': {
    NativeModules: { AnalyticsReactNative: { getContextInfo: async () => phone } },
    NativeEventEmitter: class { addListener () { return { remove: none } } },
    AppState: { currentState: 'active', addEventListener: () => ({ remove: none }) },
    Platform: { OS: 'android', select: (o) => o.android ?? o.default }
  },
  react: { createContext: () => ({}), useContext: none, useMemo: none }
}
const load = Module._load
Module._load = (name, ...rest) => stubs[name] ?? load(name, ...rest)

// The acknowledged calls are those of successful requests: the client reports only errors.
const acknowledged = new Set()
const waiting = []
const send = globalThis.fetch
globalThis.fetch = async (url, init) => {
  if (!String(url).startsWith(host + '/')) throw new Error(`a request to another host: ${url}`)
  const response = await send(url, init)
  if (init.method === 'POST' && response.ok) {
    for (const { messageId } of JSON.parse(init.body).batch) {
      if (acknowledged.has(messageId)) continue
      acknowledged.add(messageId)
      console.log(JSON.stringify({ id: messageId }))
    }
    for (const check of waiting) check()
  }
  return response
}

const { createClient, CountFlushPolicy, TimerFlushPolicy, Plugin, PluginType } = require('@segment/analytics-react-native')

// Gives each call a messageId: name-0, name-1, ….
class Name extends Plugin {
  type = PluginType.before
  count = 0
  execute (event) { return { ...event, messageId: `reactnative-${this.count++}` } }
}

// Waits until n calls are acknowledged.
const done = (n) => new Promise((resolve) => {
  const check = () => { if (acknowledged.size === n) resolve() }
  waiting.push(check)
  check()
})

async function main () {
  const showcase = what === 'showcase'
  const size = showcase ? 5 : Number(batch)
  const client = createClient({
    writeKey, cdnProxy: host + '/v1', useSegmentEndpoints: true, maxBatchSize: size,
    logger: { enable: none, disable: none, info: none, warn: none, error: (e) => console.error(e), deactivate: none },
    // Unsent calls are sent again every second, with the app's usual policies every 30 seconds.
    flushPolicies: showcase ? [new CountFlushPolicy(size)] : [new CountFlushPolicy(size), new TimerFlushPolicy(1000)]
  })
  client.add({ plugin: new Name() })
  if (showcase) {
    await client.track('Order Completed', { revenue: 99.5, total: 1e21, name: 'Ünal & \u2028 😀', none: null })
    await client.screen('Cart', { value: 3 })
    await client.identify('u1', { email: 'a@example.com', plan: 'pro' })
    await client.group('acme', { employees: 420 })
    await client.alias('u2')
    await done(5)
    return
  }
  const kinds = [
    (n) => client.identify('u1', { n }),
    (n) => client.track('E', { n }),
    () => client.screen('Cart'),
    () => client.group('acme'),
    () => client.alias('u1')
  ]
  for (let n = 0; n < Number(calls); n++) await kinds[n % kinds.length](n)
  await done(Number(calls))
}

main().then(() => process.exit(0), (error) => { console.error(error); process.exit(1) })
