'use strict'
// Verifies what the tool's -listen printed as receivers in JavaScript do: parse
// the body, stringify it again, and check X-Signature against that. Reads the
// lines on stdin and prints one JSON array.
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
