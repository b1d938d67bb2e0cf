// The comparison with the vendor's client is a separate module, so that
// Posthorn does not depend on it.
module github.com/posthorn/posthorn/hack/bench/client

go 1.26.0

require (
	github.com/posthorn/posthorn v0.0.0
	github.com/posthorn/posthorn/analytics v0.0.0
	gopkg.in/segmentio/analytics-go.v3 v3.1.0
)

require (
	github.com/segmentio/backo-go v1.1.0 // indirect
	github.com/xtgo/uuid v0.0.0-20140804021211-a0b114877d4c // indirect
)

replace github.com/posthorn/posthorn => ../../..

replace github.com/posthorn/posthorn/analytics => ../../../analytics
