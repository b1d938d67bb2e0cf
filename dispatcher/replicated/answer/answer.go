// Package answer keeps the answer to an HTTP request in memory, to send it later or elsewhere. The main
// type is Writer.
package answer

import (
	"bytes"
	"errors"
	"net/http"
)

// MaxBytes bounds the body of an answer; those to calls have less than 1 KB.
const MaxBytes = 1 << 20

// ErrTooLarge is the error of a Write that exceeds MaxBytes.
var ErrTooLarge = errors.New("the answer is too large")

// Writer is an http.ResponseWriter that keeps the answer. Informational answers are dropped. Its zero value
// is ready to use.
type Writer struct {
	header http.Header
	status int
	body   bytes.Buffer
}

// Header implements http.ResponseWriter.
func (w *Writer) Header() http.Header {
	if w.header == nil {
		w.header = http.Header{}
	}
	return w.header
}

// WriteHeader implements http.ResponseWriter.
func (w *Writer) WriteHeader(status int) {
	if w.status == 0 && status >= http.StatusOK {
		w.status = status
	}
}

// Write implements http.ResponseWriter.
func (w *Writer) Write(p []byte) (int, error) {
	w.WriteHeader(http.StatusOK)
	if w.body.Len()+len(p) > MaxBytes {
		return 0, ErrTooLarge
	}
	return w.body.Write(p)
}

// Status returns the status of the answer: 200 if the handler set none.
func (w *Writer) Status() int { return max(w.status, http.StatusOK) }

// Body returns the body. It is valid until the next Write.
func (w *Writer) Body() []byte { return w.body.Bytes() }
