'use strict'

// Returns n calls of all types in turn, with messageIds PREFIX-0, PREFIX-1, ….
exports.many = function many (prefix, n) {
  const kinds = [
    (n) => ['identify', { userId: 'u1', traits: { n } }],
    (n) => ['track', { userId: 'u1', event: 'E', properties: { n } }],
    () => ['page', { userId: 'u1', name: 'Home' }],
    () => ['screen', { userId: 'u1', name: 'Cart' }],
    () => ['group', { userId: 'u1', groupId: 'acme' }],
    () => ['alias', { userId: 'u1', previousId: 'a1' }]
  ]
  return Array.from({ length: n }, (_, i) => {
    const [kind, call] = kinds[i % kinds.length](i)
    return [kind, { ...call, messageId: `${prefix}-${i}` }]
  })
}
