package ingest

import (
	"compress/gzip"
	"errors"
	"io"
	"net"
	"net/http"
	"strings"
	"sync"

	"github.com/posthorn/posthorn/event"
)

// sizes of the buffers for bodies. A buffer grows from one to the next only
// when it is full, whatever length the request has announced: who sends
// nothing holds little.
var sizes = [...]int{8 << 10, 64 << 10, 512 << 10}

// buffers are kept for reuse, by size.
var buffers [len(sizes)]sync.Pool

// inflaters likewise; inflaterBytes is what one holds.
var inflaters = sync.Pool{New: func() any { return new(gzip.Reader) }}

const inflaterBytes = 48 << 10

// buffer is memory for a body of up to sizes[class] bytes.
type buffer struct {
	bytes []byte
	class int
}

func newBuffer(class int) *buffer {
	if b, ok := buffers[class].Get().(*buffer); ok {
		b.bytes = b.bytes[:0]
		return b
	}
	return &buffer{make([]byte, 0, sizes[class]), class}
}

func (b *buffer) release() { buffers[b.class].Put(b) }

var (
	bodyTooLarge = ofEvent(&event.Error{Code: event.CodeBodyTooLarge, Message: "the body is larger than the 512000 bytes allowed, after inflation; split the batch"})
	busy         = refuse(http.StatusServiceUnavailable, codeBusy, "too many requests are in progress; send again").again(retryAfterBusy)
)

// read reads a body within the limits of its size and of the memory of all
// requests. The buffer is the caller's to release.
func (h *Handler) read(w http.ResponseWriter, q *request) (*buffer, *refusal) {
	var zipped bool
	switch strings.ToLower(strings.TrimSpace(q.Header.Get("Content-Encoding"))) {
	case "", "identity":
	case "gzip", "x-gzip":
		zipped = true
	default:
		w.Header().Set("Accept-Encoding", "gzip")
		return nil, refuse(http.StatusUnsupportedMediaType, codeEncoding, "Content-Encoding must be gzip or absent")
	}
	if q.ContentLength > event.MaxBodyBytes {
		return nil, bodyTooLarge
	}
	class := 0
	if q.ContentLength >= int64(sizes[0]) || zipped {
		class = 1
	}
	need := int64(sizes[class] + headerBytes(q.Header))
	if zipped {
		need += inflaterBytes
	}
	if !q.memory.grow(need, h.MaxBuffered) {
		return nil, busy
	}
	var body io.Reader = q.Body
	if q.ContentLength < 0 {
		body = http.MaxBytesReader(w, q.Body, event.MaxBodyBytes)
	}
	if zipped {
		z := inflaters.Get().(*gzip.Reader)
		defer inflaters.Put(z)
		if err := z.Reset(body); err != nil {
			return nil, unreadable(err, "the body is not gzip, as Content-Encoding says")
		}
		body = z
	}
	b := newBuffer(class)
	for {
		if len(b.bytes) == cap(b.bytes) {
			larger := b.class + 1
			if !q.memory.grow(int64(sizes[larger]-sizes[b.class]), h.MaxBuffered) {
				b.release()
				return nil, busy
			}
			grown := newBuffer(larger)
			grown.bytes = append(grown.bytes, b.bytes...)
			b.release()
			b = grown
		}
		n, err := body.Read(b.bytes[len(b.bytes):cap(b.bytes)])
		b.bytes = b.bytes[:len(b.bytes)+n]
		switch {
		case len(b.bytes) > event.MaxBodyBytes:
			b.release()
			return nil, bodyTooLarge
		case errors.Is(err, io.EOF):
			return b, nil
		case err != nil:
			b.release()
			return nil, unreadable(err, "the body could not be read to its end")
		}
	}
}

// headerBytes is about what a request's headers take in memory.
func headerBytes(header http.Header) (n int) {
	for name, values := range header {
		n += len(name) + 64
		for _, v := range values {
			n += len(v) + 16
		}
	}
	return n
}

func unreadable(err error, message string) *refusal {
	if _, ok := errors.AsType[*http.MaxBytesError](err); ok {
		return bodyTooLarge
	}
	if timeout, ok := errors.AsType[net.Error](err); ok && timeout.Timeout() {
		return refuse(http.StatusRequestTimeout, codeTooSlow, "the body did not arrive in time; send again")
	}
	return refuse(http.StatusBadRequest, codeUnreadable, message)
}
