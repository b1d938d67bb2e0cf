package ingest

import (
	"bytes"
	"compress/gzip"
	"io"
	"net/http"
	"strings"

	"github.com/posthorn/posthorn/analytics/event"
	"github.com/posthorn/posthorn/dispatcher/intake/admission"
)

// WriteKey returns the write key of a request, as far as it is known without the body. inBody is true
// if the body of the request may have a key; see WriteKeyInBody.
func WriteKey(r *http.Request) (key string, inBody bool) {
	if key := admission.WriteKey(r.Header); key != "" {
		return key, false
	}
	path := strings.TrimSuffix(r.URL.Path, "/")
	if key, ok := settingsKey(path); ok {
		return key, false
	}
	_, isCall := typeOf(path)
	return "", isCall && r.Method == http.MethodPost
}

// typeOf returns the type of the calls of a path; ok is false if the path takes no calls.
func typeOf(path string) (typ event.Type, ok bool) {
	if typ, ok = paths[path]; !ok {
		typ, ok = short[path]
	}
	return typ, ok
}

// WriteKeyInBody returns the write key in the body of a request, of which it gets a copy; "" if it
// cannot be read.
func WriteKeyInBody(r *http.Request, body []byte) string {
	switch strings.ToLower(strings.TrimSpace(r.Header.Get("Content-Encoding"))) {
	case "gzip", "x-gzip":
		z, err := gzip.NewReader(bytes.NewReader(body))
		if err != nil {
			return ""
		}
		if body, err = io.ReadAll(io.LimitReader(z, event.MaxBodyBytes)); err != nil {
			return ""
		}
	}
	typ, _ := typeOf(strings.TrimSuffix(r.URL.Path, "/"))
	reading, err := event.Request{Type: typ}.Read(body)
	if err == nil {
		reading.Release()
	}
	return reading.WriteKey
}
