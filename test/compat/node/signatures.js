// A receiver that verifies signatures with the library that VERIFIER names, under SECRET: 200 if a request is
// authentic, 401 with the library's error otherwise. It prints its URL and ends with its input.
const { createServer } = require('node:http')

const secret = process.env.SECRET
const libraries = {
  async github () {
    const { verify } = await import('@octokit/webhooks-methods')
    return async (body, headers) => {
      if (!await verify(secret, body, headers['x-hub-signature-256'])) throw new Error('not authentic')
    }
  },
  async stripe () {
    const Stripe = require('stripe')
    return async (body, headers) => Stripe.webhooks.constructEvent(body, headers['stripe-signature'], secret)
  },
  async standardwebhooks () {
    const { Webhook } = require('standardwebhooks')
    const webhook = new Webhook(secret)
    return async (body, headers) => webhook.verify(body, headers)
  }
}

libraries[process.env.VERIFIER]().then(verify => {
  const server = createServer((request, response) => {
    const parts = []
    request.on('data', part => parts.push(part)).on('end', () => {
      verify(Buffer.concat(parts).toString(), request.headers).then(
        () => response.end('authentic'),
        error => response.writeHead(401).end(error.message))
    })
  })
  server.listen(0, '127.0.0.1', () => console.log(`http://127.0.0.1:${server.address().port}/`))
  process.stdin.on('end', () => process.exit()).resume()
})
