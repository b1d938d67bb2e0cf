'use strict'
// Sends calls as a web page in a browser does: with preflight requests of the Fetch
// standard, checks of the answers, fetch and sendBeacon. Prints one line of JSON {id} per
// call.
//
//   node page.js <endpoint> <writeKey> <origin>

const [host, writeKey, origin] = process.argv.slice(2)

const page = {
  Origin: origin, Referer: origin + '/cart?x=1',
  'User-Agent': 'Mozilla/5.0 (X11; Linux x86_64; rv:140.0) Gecko/20100101 Firefox/140.0', 'Accept-Language': 'de-AT,de;q=0.8'
}

const safeTypes = ['text/plain', 'application/x-www-form-urlencoded', 'multipart/form-data']

const list = (header) => (header ?? '').toLowerCase().split(',').map((s) => s.trim())

// Reports whether the page may read an answer and its Retry-After. With credentials a
// wildcard is not sufficient.
function mayRead (response, credentials) {
  const exposed = list(response.headers.get('access-control-expose-headers'))
  if (!exposed.includes('retry-after')) throw new Error('the page may not read Retry-After')
  const allowed = response.headers.get('access-control-allow-origin')
  if (credentials) return allowed === origin && response.headers.get('access-control-allow-credentials') === 'true'
  return allowed === origin || allowed === '*'
}

async function preflight (path, headers, credentials) {
  const response = await fetch(host + path, {
    method: 'OPTIONS',
    headers: { ...page, 'Access-Control-Request-Method': 'POST', 'Access-Control-Request-Headers': headers.join(','), 'Sec-Fetch-Mode': 'cors' }
  })
  if (!response.ok) throw new Error(`preflight: ${response.status}`)
  if (!mayRead(response, credentials)) throw new Error('preflight: origin not allowed')
  const allowed = list(response.headers.get('access-control-allow-headers'))
  for (const h of headers) if (!allowed.includes(h)) throw new Error(`preflight: header ${h} not allowed`)
  const methods = list(response.headers.get('access-control-allow-methods'))
  if (!methods.includes('post')) throw new Error('preflight: POST not allowed')
}

// Sends a call as fetch() does: unsafe headers need a preflight request.
async function send (path, call, { headers = {}, credentials = false } = {}) {
  const unsafe = Object.entries(headers).filter(([name, value]) => name !== 'content-type' || !safeTypes.includes(value.split(';')[0])).map(([name]) => name).sort()
  if (unsafe.length > 0) await preflight(path, unsafe, credentials)
  const response = await fetch(host + path, {
    method: 'POST', body: JSON.stringify(call),
    headers: { ...page, ...headers, ...(credentials ? { Cookie: 'session=1' } : {}) }
  })
  if (!mayRead(response, credentials)) throw new Error('the page may not read the answer')
  const answer = await response.text()
  if (!response.ok) throw new Error(`${response.status} ${answer}`)
  if (JSON.parse(answer).success !== true) throw new Error(answer)
  for (const c of call.batch ?? [call]) console.log(JSON.stringify({ id: c.messageId }))
}

const context = { library: { name: 'page', version: '1' }, page: { path: '/cart', url: origin + '/cart?x=1', title: 'Cart <1>' } }

async function main () {
  const sentAt = new Date()
  // A JSON body and the key as Basic user both need a preflight request.
  await send('/v1/track', { type: 'track', messageId: 'page-json', anonymousId: 'a1', event: 'Clicked', properties: { x: 1.5 }, context, timestamp: sentAt, sentAt },
    { headers: { 'content-type': 'application/json', authorization: 'Basic ' + Buffer.from(writeKey + ':').toString('base64') } })
  // Plain text needs no preflight request; the key is in the body. The path is short, as in the vendor's browser client.
  await send('/v1/p', { type: 'page', messageId: 'page-plain', anonymousId: 'a1', userId: null, name: 'Cart', properties: context.page, context, integrations: {}, writeKey, timestamp: sentAt, sentAt, _metadata: { bundled: [], unbundled: [] } },
    { headers: { 'content-type': 'text/plain' } })
  // sendBeacon sends text, and always the browser's cookies.
  await send('/v1/batch', {
    writeKey, sentAt, context,
    batch: [
      { type: 'identify', messageId: 'page-beacon-1', anonymousId: 'a1', userId: 'u1', traits: { name: 'Ünal' }, timestamp: sentAt },
      { type: 'track', messageId: 'page-beacon-2', anonymousId: 'a1', event: 'Left', timestamp: sentAt },
      { type: 'group', messageId: 'page-beacon-3', userId: 'u1', groupId: 'acme', timestamp: sentAt },
      { type: 'alias', messageId: 'page-beacon-4', userId: 'u1', previousId: 'a1', timestamp: sentAt }
    ]
  }, { headers: { 'content-type': 'text/plain;charset=UTF-8' }, credentials: true })
}

main().catch((error) => { console.error(error); process.exit(1) })
