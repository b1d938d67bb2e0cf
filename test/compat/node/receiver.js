'use strict'
// A webhook that verifies as receivers in JavaScript do: it parses the body, stringifies
// it again and compares X-Signature with the signature of that text. GET returns the requests.
//
//   SECRET=… node receiver.js      prints its URL; ends when stdin ends
//
// After PUT /500 it answers 500 and records no request, until PUT /200.

const crypto = require('crypto')
const http = require('http')

const arrived = []
let status = 200

const server = http.createServer((request, response) => {
  if (request.method === 'GET') return response.end(JSON.stringify(arrived))
  if (request.method === 'PUT') {
    status = Number(request.url.slice(1))
    return response.end()
  }
  const chunks = []
  request.on('data', (chunk) => chunks.push(chunk))
  request.on('end', () => {
    if (status !== 200) {
      response.statusCode = status
      return response.end()
    }
    const body = Buffer.concat(chunks).toString('utf8')
    const again = JSON.stringify(JSON.parse(body))
    const signature = crypto.createHmac('sha1', process.env.SECRET).update(again, 'utf8').digest('hex')
    const authentic = request.headers['x-signature'] === signature
    arrived.push({ id: JSON.parse(body).messageId, key: request.headers['idempotency-key'], body, authentic, fixed: again === body })
    response.statusCode = authentic ? 200 : 401
    response.end()
  })
})
server.listen(0, '127.0.0.1', () => console.log(`http://127.0.0.1:${server.address().port}/in`))
process.stdin.on('end', () => process.exit(0)).resume()
