'use strict'
// Opens a page in Chromium that loads the vendor's browser client and its settings, and sends a call
// of every type, and then sends calls as customers' pages do: with double slashes, large heads and cookies, and without
// an origin. Prints one line of JSON {id} per acknowledged call.
//
//   node chromium.js <chromium> <https endpoint> <writeKey> <origin>
//
// Chromium resolves the page's host and track.example to this machine, and no other name: a request
// to another host fails, and ends this program with an error.

const { spawn } = require('node:child_process')
const { createServer } = require('node:http')
const https = require('node:https')
const { mkdtempSync, readFileSync, rmSync } = require('node:fs')
const { tmpdir } = require('node:os')
const { join } = require('node:path')

const [chromium, endpoint, writeKey, origin] = process.argv.slice(2)
const cdnURL = 'https://track.example'

// The page runs this function.
async function shop (writeKey, cdnURL) {
  const { AnalyticsBrowser } = window.AnalyticsNext
  const acknowledged = new Set()
  const send = window.fetch
  const waiting = []
  window.fetch = async (url, init) => {
    const response = await send(url, init)
    if (init?.method === 'post' && response.ok) {
      acknowledged.add(JSON.parse(init.body).messageId)
      for (const check of waiting) check()
    }
    return response
  }
  const result = { ids: [], hosts: [], statuses: {} }
  try {
    const [analytics] = await AnalyticsBrowser.load({ writeKey, cdnURL })
    const calls = [
      analytics.page('Docs', 'Home'), analytics.track('Order Completed', { revenue: 99.5 }), analytics.identify('u1', { plan: 'pro' }),
      analytics.screen('Cart'), analytics.group('acme', { employees: 420 }), analytics.alias('u2', 'u1')
    ]
    result.ids = (await Promise.all(calls)).map((context) => context.event.messageId)
    await new Promise((resolve) => {
      const check = () => { if (result.ids.every((id) => acknowledged.has(id))) resolve() }
      waiting.push(check)
      check()
    })
    const call = async (name, url, headers) => {
      const body = JSON.stringify({ writeKey, userId: 'u1', event: 'Page Closed', messageId: name })
      const { status } = await send(url, { method: 'POST', headers: { 'Content-Type': 'application/json', ...headers }, body })
      if (status === 200) result.ids.push(name)
      result.statuses[name] = status
    }
    const setCookies = (n) => { for (let i = 0; i < n; i++) document.cookie = `session${i}=${'c'.repeat(4000)}` }
    await call('double-slashes', cdnURL + '//v1//track/')
    await call('long-header', cdnURL + '/v1/track/', { 'X-Long': 'x'.repeat(60_000) })
    await call('header-over-the-limit', cdnURL + '/v1/track/', { 'X-Long': 'x'.repeat(70_000) })
    setCookies(15)
    await call('cookies-of-the-site', '/v1/track')
    setCookies(20)
    await call('cookies-over-the-limit', '/v1/track')
    const frame = document.createElement('iframe')
    frame.sandbox = 'allow-scripts'
    frame.srcdoc = `<script>fetch('${cdnURL}/v1/screen', { method: 'POST', body: '{"writeKey":"${writeKey}","userId":"u1","messageId":"no-origin"}' }).then((r) => parent.postMessage(r.status, '*'), (e) => parent.postMessage(String(e), '*'))<\/script>`
    const posted = new Promise((resolve) => { window.onmessage = (event) => resolve(event.data) })
    document.documentElement.append(frame)
    result.statuses['no-origin'] = await posted
    result.ids.push('no-origin')
    result.apiHost = analytics.settings.cdnSettings.integrations['Segment.io'].apiHost
  } catch (error) {
    result.error = String(error)
  }
  // Failed requests are listed, too.
  result.hosts = [...new Set(performance.getEntriesByType('resource').map((entry) => new URL(entry.name).host))]
  await send('/result', { method: 'POST', body: JSON.stringify(result) })
}

const page = `<!doctype html><title>Shop</title><script src="/client.js"></script><script>(${shop})(${JSON.stringify(writeKey)}, ${JSON.stringify(cdnURL)})</script>`
const client = readFileSync(join(__dirname, 'node_modules/@segment/analytics-next/dist/umd/index.js'))
const wantStatuses = JSON.stringify({
  'double-slashes': 200, 'long-header': 200, 'header-over-the-limit': 431, 'cookies-of-the-site': 200, 'cookies-over-the-limit': 431, 'no-origin': 200
})
const profile = mkdtempSync(join(tmpdir(), 'posthorn-chromium-'))

const server = createServer({ maxHeaderSize: 256 << 10 }, (request, response) => {
  if (request.url.startsWith('/v1/')) { // The site's proxy in front of the tracking API.
    return request.pipe(https.request(endpoint + request.url, { method: request.method, headers: request.headers, rejectUnauthorized: false }, (from) => {
      response.writeHead(from.statusCode, from.headers)
      from.pipe(response)
    }))
  }
  if (request.url === '/client.js') return response.setHeader('Content-Type', 'text/javascript').end(client)
  if (request.url !== '/result') return response.setHeader('Content-Type', 'text/html').end(page)
  let text = ''
  request.on('data', (part) => { text += part })
  request.on('end', () => {
    response.end()
    finish(JSON.parse(text))
  })
})

let browser
server.listen(0, '127.0.0.1', () => {
  const rules = [`MAP ${new URL(origin).host} 127.0.0.1:${server.address().port}`, `MAP track.example ${new URL(endpoint).host}`, 'MAP * ~NOTFOUND', 'EXCLUDE 127.0.0.1']
  browser = spawn(chromium, [
    '--headless=new', '--no-sandbox', '--disable-gpu', '--disable-dev-shm-usage', '--no-first-run', '--disable-background-networking',
    '--ignore-certificate-errors', `--user-data-dir=${profile}`, `--host-resolver-rules=${rules.join(', ')}`, origin + '/'
  ], { stdio: ['ignore', 'ignore', 'pipe'] })
  let log = ''
  browser.stderr.on('data', (part) => { log = (log + part).slice(-10_000) })
  browser.on('exit', () => { finish({ error: 'Chromium ended: ' + log }) })
})
process.on('SIGTERM', () => { finish({ error: 'stopped' }) })

let finished = false
function finish (result) {
  if (finished) return
  finished = true
  const statuses = JSON.stringify(result.statuses)
  const wrong = result.error ?? ((statuses !== wantStatuses && `statuses: got ${statuses}, want ${wantStatuses}`) || (result.hosts.some((host) => host !== 'track.example' && host !== new URL(origin).host) && `requests to ${result.hosts}`))
  if (wrong) console.error(wrong)
  else for (const id of result.ids) console.log(JSON.stringify({ id }))
  // The event close follows the end of the child processes, which write to the profile, too.
  browser.once('close', () => {
    rmSync(profile, { recursive: true, force: true, maxRetries: 20 })
    process.exit(wrong ? 1 : 0)
  })
  if (browser.exitCode !== null || !browser.kill()) process.exit(1)
}
