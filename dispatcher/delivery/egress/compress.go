package egress

import (
	"bytes"
	"net/http"
	"sync"

	"github.com/klauspost/compress/gzip"
)

// minCompressed is the size of the smallest body that is compressed.
const minCompressed = 1 << 10

var compressors = sync.Pool{New: func() any {
	w, _ := gzip.NewWriterLevel(nil, gzip.BestSpeed) // The level is valid.
	return w
}}

// compress returns a body in the gzip format, in memory of s; nil if the endpoint does not get it compressed, or if it does
// not become smaller.
func (e *Endpoint) compress(s *scratch, body []byte) []byte {
	if !e.gzip || len(body) < minCompressed || e.CompressionRefused() {
		return nil
	}
	w := compressors.Get().(*gzip.Writer)
	defer compressors.Put(w)
	to := bytes.NewBuffer(s.compressed[:0])
	w.Reset(to)
	_, _ = w.Write(body)
	_ = w.Close() // A buffer has no errors.
	if s.compressed = to.Bytes(); len(s.compressed) >= len(body) {
		return nil
	}
	return s.compressed
}

// CompressionRefused reports whether the endpoint answered 415 (Unsupported Media Type) to a compressed request. It gets
// uncompressed ones since, until its config changes.
func (e *Endpoint) CompressionRefused() bool { return e != nil && e.refused != nil && e.refused.Load() }

// refusesCompression records a response to a compressed request, and reports whether it must be sent uncompressed.
func (e *Endpoint) refusesCompression(statusCode int) bool {
	if statusCode != http.StatusUnsupportedMediaType {
		return false
	}
	e.refused.Store(true)
	return true
}
