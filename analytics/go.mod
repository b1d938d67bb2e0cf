// The Go client, and package event, which the dispatcher uses too. The module requires no
// other module, in tests neither: what it requires becomes a part of the build list of every
// application. See docs/adr/0026-the-go-client-is-a-module.md.
module github.com/posthorn/posthorn/analytics

go 1.24
