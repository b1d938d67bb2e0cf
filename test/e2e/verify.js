'use strict'
// Verifies the requests that `tool -listen` printed, as receivers in JavaScript do: it parses
// the body, stringifies it again, and compares X-Signature with the signature of that text.
// It reads the lines on stdin and prints one JSON array.
//
//   SECRET=… node verify.js < lines

const crypto = require('crypto')
const fs = require('fs')

const lines = fs.readFileSync(0, 'utf8').split('\n').filter(Boolean)
console.log(JSON.stringify(lines.map((line) => {
  const { headers, body } = JSON.parse(line)
  const message = JSON.parse(body)
  const again = JSON.stringify(message)
  const signature = crypto.createHmac('sha1', process.env.SECRET).update(again, 'utf8').digest('hex')
  return { authentic: headers['X-Signature']?.[0] === signature, fixed: again === body, message }
})))
