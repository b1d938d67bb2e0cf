package ingest

import (
	"bytes"
	"compress/flate"
	"compress/gzip"
	"errors"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"unicode/utf8"

	"golang.org/x/text/encoding/charmap"

	"github.com/posthorn/posthorn/analytics/event"
	"github.com/posthorn/posthorn/dispatcher/intake/admission"
)

// sizes are the capacities of the body buffers. A buffer grows to the next size only when it is
// full, whatever length the request announces, so an idle sender holds little memory.
var sizes = [...]int{8 << 10, 64 << 10, 512 << 10}

// buffers are pools of buffers, one per size.
var buffers [len(sizes)]sync.Pool

// inflaters is the pool of gzip readers; each holds inflaterBytes of memory.
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
	busy         = admission.Retry(1, admission.CodeBusy, "too many requests are in progress; send the request again")
)

// read reads a body within the size limit and the memory limit. The caller releases the buffer.
//
// A body that begins with gzip's magic number is inflated, and any other body is read as it is,
// whatever Content-Encoding says: beacons compress without the header, and gateways inflate without
// removing it.
func (h *Handler) read(w http.ResponseWriter, q *request) (*buffer, *admission.Refusal) {
	encoding := strings.ToLower(strings.TrimSpace(q.Header.Get("Content-Encoding")))
	if slices.Contains([]string{"br", "compress", "deflate", "zstd"}, encoding) || strings.Contains(encoding, ",") {
		w.Header().Set("Accept-Encoding", "gzip")
		return nil, admission.Refuse(http.StatusUnsupportedMediaType, admission.CodeEncoding, "Content-Encoding must be gzip or absent; remove the header or compress the body with gzip")
	}
	if q.ContentLength > event.MaxBodyBytes {
		h.countHead(q)
		return nil, bodyTooLarge
	}
	if !q.memory.Grow(int64(headerBytes(q.Header))) {
		return nil, busy
	}
	var body io.Reader = q.Body
	if q.ContentLength < 0 {
		body = http.MaxBytesReader(w, q.Body, event.MaxBodyBytes)
	}
	b, bad := fill(q, body)
	if bad != nil {
		return nil, bad
	}
	if !bytes.HasPrefix(b.bytes, gzipMagic) {
		return toUTF8(q, b)
	}
	// Only a body that has arrived is inflated: a slow sender occupies no inflater.
	defer b.release()
	if !q.memory.Grow(inflaterBytes) {
		return nil, busy
	}
	z := inflaters.Get().(*gzip.Reader)
	defer inflaters.Put(z)
	if err := z.Reset(bytes.NewReader(b.bytes)); err != nil {
		return nil, unreadable(err)
	}
	inflated, bad := fill(q, z)
	if bad != nil {
		return nil, bad
	}
	return toUTF8(q, inflated)
}

// toUTF8 converts a body that is declared as Latin-1. Old clients declare it for bodies in UTF-8, too, and those are
// kept. As in browsers, Latin-1 means its superset Windows-1252.
func toUTF8(q *request, b *buffer) (*buffer, *admission.Refusal) {
	_, charset, _ := strings.Cut(strings.ToLower(q.Header.Get(headerContentType)), "charset=")
	charset, _, _ = strings.Cut(charset, ";")
	switch strings.Trim(charset, `" `) {
	case "iso-8859-1", "iso8859-1", "latin1", "windows-1252", "cp1252":
	default:
		return b, nil
	}
	if utf8.Valid(b.bytes) {
		return b, nil
	}
	defer b.release()
	return fill(q, charmap.Windows1252.NewDecoder().Reader(bytes.NewReader(b.bytes)))
}

// gzipMagic begins each gzip stream of the only method; JSON never begins with it.
var gzipMagic = []byte{0x1f, 0x8b, 8}

// fill reads a body into a buffer, and reserves its memory. The first buffer is small, whatever length the
// request announces.
func fill(q *request, body io.Reader) (*buffer, *admission.Refusal) {
	if !q.memory.Grow(int64(sizes[0])) {
		return nil, busy
	}
	b := newBuffer(0)
	for {
		if len(b.bytes) == cap(b.bytes) {
			larger := b.class + 1
			if !q.memory.Grow(int64(sizes[larger] - sizes[b.class])) {
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
			q.countOf(b.bytes[:event.MaxBodyBytes], 0)
			b.release()
			return nil, bodyTooLarge
		case errors.Is(err, io.EOF):
			return b, nil
		case err != nil:
			b.release()
			return nil, unreadable(err)
		}
	}
}

// headerBytes estimates the memory that a request's headers take.
func headerBytes(header http.Header) (n int) {
	for name, values := range header {
		n += len(name) + 64
		for _, v := range values {
			n += len(v) + 16
		}
	}
	return n
}

func unreadable(err error) *admission.Refusal {
	if _, ok := errors.AsType[*http.MaxBytesError](err); ok {
		return bodyTooLarge
	}
	if timeout, ok := errors.AsType[net.Error](err); ok && timeout.Timeout() {
		return admission.Refuse(http.StatusRequestTimeout, admission.CodeTooSlow, "the body did not arrive within the read timeout; send the request again")
	}
	message := "the body ended early; send the request again"
	if _, damaged := errors.AsType[flate.CorruptInputError](err); damaged || errors.Is(err, gzip.ErrChecksum) ||
		errors.Is(err, gzip.ErrHeader) {
		message = "the body begins as gzip, but is damaged or has other bytes after its end; compress it again, and send nothing after it"
	}
	return admission.Refuse(http.StatusBadRequest, admission.CodeUnreadable, message)
}
