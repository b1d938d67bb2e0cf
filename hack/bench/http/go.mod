// The comparison of HTTP clients is a separate module, so that Posthorn
// depends on none of them.
module github.com/posthorn/posthorn/hack/bench/http

go 1.26.0

require (
	github.com/posthorn/posthorn v0.0.0
	github.com/valyala/fasthttp v1.68.0
)

require (
	github.com/andybalholm/brotli v1.2.0 // indirect
	github.com/klauspost/compress v1.20.3 // indirect
	github.com/valyala/bytebufferpool v1.0.0 // indirect
	golang.org/x/net v0.60.0 // indirect
	golang.org/x/oauth2 v0.36.0 // indirect
	golang.org/x/text v0.43.0 // indirect
)

replace github.com/posthorn/posthorn => ../../..

replace github.com/posthorn/posthorn/analytics => ../../../analytics
