package ingest

import (
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"net/http"
	"strings"
	"sync"

	"github.com/posthorn/posthorn/event"
)

// bodies are kept for reuse, so that a busy server does not allocate per request.
var bodies = sync.Pool{New: func() any { return new(bytes.Buffer) }}

// inflaters likewise; one holds some 40 KB.
var inflaters = sync.Pool{New: func() any { return new(gzip.Reader) }}

// maxKept is the largest buffer that is kept.
const maxKept = 1 << 20

var bodyTooLarge = ofEvent(&event.Error{Code: event.CodeBodyTooLarge, Message: "the body is larger than the 512000 bytes allowed, after inflation; split the batch"})

// read reads a body within the limits of its size and of all bodies together.
// After it returned a buffer, done must be called.
func (h *Handler) read(w http.ResponseWriter, q *request) (*bytes.Buffer, *refusal) {
	encoding := strings.ToLower(strings.TrimSpace(q.Header.Get("Content-Encoding")))
	if encoding != "" && encoding != "identity" && encoding != "gzip" {
		return nil, refuse(http.StatusUnsupportedMediaType, codeEncoding, "Content-Encoding must be gzip or absent")
	}
	if q.ContentLength > event.MaxBodyBytes {
		return nil, bodyTooLarge
	}
	if bad := h.reserve(q); bad != nil {
		return nil, bad
	}
	buf := bodies.Get().(*bytes.Buffer)
	buf.Reset()
	bad := inflate(buf, http.MaxBytesReader(w, q.Body, event.MaxBodyBytes), encoding == "gzip")
	if bad != nil {
		h.done(q, buf)
		return nil, bad
	}
	return buf, nil
}

// inflate copies a body into buf, at most MaxBodyBytes of what it holds.
func inflate(buf *bytes.Buffer, body io.Reader, zipped bool) *refusal {
	if zipped {
		z := inflaters.Get().(*gzip.Reader)
		defer inflaters.Put(z)
		if err := z.Reset(body); err != nil {
			return unreadable(err, "the body is not gzip, as Content-Encoding says")
		}
		body = z
	}
	n, err := buf.ReadFrom(io.LimitReader(body, event.MaxBodyBytes+1))
	if n > event.MaxBodyBytes {
		return bodyTooLarge
	}
	if err != nil {
		return unreadable(err, "the body could not be read to its end")
	}
	return nil
}

func unreadable(err error, message string) *refusal {
	if _, ok := errors.AsType[*http.MaxBytesError](err); ok {
		return bodyTooLarge
	}
	return refuse(http.StatusBadRequest, codeUnreadable, message)
}

// reserve takes room for one body from the budget of all bodies. A Source may
// take half of it, so that a flood from one leaves room for the others.
func (h *Handler) reserve(q *request) *refusal {
	over := h.buffered.Add(event.MaxBodyBytes) > h.MaxBuffered
	if q.source != nil {
		over = q.source.buffered.Add(event.MaxBodyBytes) > h.MaxBuffered/2 || over
	}
	if over {
		h.free(q)
		return refuse(http.StatusServiceUnavailable, codeBusy, "too many requests are being read at once; send again").again(retryAfterBusy)
	}
	q.reserved = q.source
	return nil
}

// free gives the room of one body back.
func (h *Handler) free(q *request) {
	h.buffered.Add(-event.MaxBodyBytes)
	if q.source != nil {
		q.source.buffered.Add(-event.MaxBodyBytes)
	}
}

// done ends the use of a body.
func (h *Handler) done(q *request, buf *bytes.Buffer) {
	h.buffered.Add(-event.MaxBodyBytes)
	if q.reserved != nil {
		q.reserved.buffered.Add(-event.MaxBodyBytes)
	}
	if buf.Cap() <= maxKept {
		bodies.Put(buf)
	}
}
