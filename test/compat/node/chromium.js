'use strict'
// Opens a page in Chromium that loads the vendor's browser client and its settings, and sends a call
// of every type. Prints one line of JSON {id} per acknowledged call.
//
//   node chromium.js <chromium> <https endpoint> <writeKey> <origin>
//
// Chromium resolves the page's host and track.example to this machine, and no other name: a request
// to another host fails, and ends this program with an error.

const { spawn } = require('node:child_process')
const { createServer } = require('node:http')
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
  const result = { ids: [], hosts: [] }
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
const profile = mkdtempSync(join(tmpdir(), 'posthorn-chromium-'))

const server = createServer((request, response) => {
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
  const wrong = result.error ?? (result.hosts.some((host) => host !== 'track.example' && host !== new URL(origin).host) && `requests to ${result.hosts}`)
  if (wrong) console.error(wrong)
  else for (const id of result.ids) console.log(JSON.stringify({ id }))
  // The event close follows the end of the child processes, which write to the profile, too.
  browser.once('close', () => {
    rmSync(profile, { recursive: true, force: true, maxRetries: 20 })
    process.exit(wrong ? 1 : 0)
  })
  if (browser.exitCode !== null || !browser.kill()) process.exit(1)
}
