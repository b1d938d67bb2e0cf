// Validates requests as "posthorn render -o json" prints them, one a line of standard input, with the library or the types of the
// vendor in VENDOR. It prints why a request is not valid, and exits 1.
const fail = why => { console.log(why); process.exitCode = 1 }

const vendors = {
  // The body is what Slack's client for incoming webhooks sends.
  slack (request) {
    const ts = require('typescript')
    const file = `${__dirname}/message.ts`
    const text = `import type { IncomingWebhookSendArguments } from '@slack/webhook'\nexport const m: IncomingWebhookSendArguments = ${request.body}`
    const options = { noEmit: true, strict: true, skipLibCheck: true, types: [], module: ts.ModuleKind.Node16, moduleResolution: ts.ModuleResolutionKind.Node16 }
    const host = ts.createCompilerHost(options)
    const { fileExists, readFile, getSourceFile } = host
    host.fileExists = name => name === file || fileExists(name)
    host.readFile = name => name === file ? text : readFile(name)
    host.getSourceFile = (name, ...rest) => name === file ? ts.createSourceFile(name, text, ...rest) : getSourceFile(name, ...rest)
    for (const d of ts.getPreEmitDiagnostics(ts.createProgram([file], options, host))) fail(ts.flattenDiagnosticMessageText(d.messageText, '\n'))
  },
  // The attachments are cards that Microsoft's renderer parses without a complaint.
  teams (request) {
    const { AdaptiveCard, SerializationContext, Versions } = require('adaptivecards/dist/adaptivecards')
    const { type, attachments } = JSON.parse(request.body)
    if (type !== 'message' || attachments.length === 0) fail('the body is not a message with attachments')
    for (const { contentType, content } of attachments) {
      if (contentType !== 'application/vnd.microsoft.card.adaptive') fail(`contentType ${contentType}`)
      const card = new AdaptiveCard()
      const context = new SerializationContext(Versions.latest)
      card.parse(content, context)
      for (let i = 0; i < context.eventCount; i++) fail(context.getEventAt(i).message)
      for (const f of card.validateProperties().validationEvents) fail(f.message)
      if (card.getItemCount() === 0) fail('the card is empty')
    }
  },
  // Segment's Actions webhook makes the same request for the delivered call, with its default mapping.
  segment (request) {
    const webhook = require('@segment/action-destinations/dist/destinations/webhook').default
    const { transform } = require('@segment/actions-core')
    const { fields, perform } = webhook.actions.send
    const data = transform(fields.data.default, JSON.parse(request.body))
    const payload = { url: request.url, method: fields.method.default, data }
    const { headers } = webhook.extendRequest({ settings: { sharedSecret: process.env.SECRET }, payload })
    perform((url, { method, json }) => {
      const header = request.headers.find(h => h.name === 'X-Signature')
      for (const [what, got, want] of [['url', request.url, url], ['method', request.method, method], ['body', request.body, JSON.stringify(json)],
        ['X-Signature', header?.value, headers['X-Signature']]]) if (got !== want) fail(`${what}: got ${got}, want ${want}`)
    }, { payload })
  }
}

const lines = require('node:fs').readFileSync(0, 'utf8').trim().split('\n')
for (const line of lines) vendors[process.env.VENDOR](JSON.parse(line))
