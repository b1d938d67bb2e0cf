package ingest

import (
	"bytes"
	"io"
	"math"

	"github.com/posthorn/posthorn/analytics/event"
	"github.com/posthorn/posthorn/dispatcher/intake/admission"
)

// bytesPerRefusedCall estimates the calls of a body that was not read.
const bytesPerRefusedCall = 512

// refusedCalls is the number of calls of a refused request. It is an estimate if the refusal does
// not know it and the body was not read to its end.
func (q *request) refusedCalls(typ event.Type, bad *admission.Refusal) (n int, estimated bool) {
	switch {
	case bad.Calls > 0:
		return bad.Calls, false
	case typ != "":
		return 1, false
	case q.batchCalls > 0:
		return q.batchCalls, q.bodyCut
	}
	n = int(min(max(1, q.ContentLength/bytesPerRefusedCall), math.MaxInt32))
	return n, n > 1
}

// countOf remembers how many calls a refused batch has. body is its beginning, and total its size,
// or less if that is unknown.
func (q *request) countOf(body []byte, total int64) {
	calls, from, to := scanCalls(body)
	q.batchCalls, q.bodyCut = calls, total != int64(len(body))
	if calls > 0 && total > int64(len(body)) {
		q.batchCalls = int(math.Round(float64(calls) * float64(total-int64(from)) / float64(to-from)))
	}
}

// countHead is countOf for a body that is too large to be read: its first bytes stand for the rest.
func (h *Handler) countHead(q *request) {
	const class = 1 // 64 KiB
	if q.source == h.Gate.Unidentified || !q.memory.Grow(int64(sizes[class])) {
		return
	}
	b := newBuffer(class)
	defer b.release()
	n, _ := io.ReadFull(q.Body, b.bytes[:cap(b.bytes)])
	if head := b.bytes[:n]; !bytes.HasPrefix(head, gzipMagic) {
		q.countOf(head, q.ContentLength)
	}
}

// scanCalls counts the complete objects in the arrays of the outermost object of a text, which may
// be cut or invalid. It returns the first byte of the first one, and the end of the last one.
func scanCalls(text []byte) (calls, from, to int) {
	depth, inArray := 0, false
	for i := 0; i < len(text); i++ {
		switch text[i] {
		case '"':
			for i++; i < len(text) && text[i] != '"'; i++ {
				if text[i] == '\\' {
					i++
				}
			}
		case '[', '{':
			if depth++; depth == 2 {
				inArray = text[i] == '['
			} else if depth == 3 && calls == 0 {
				from = i
			}
		case ']', '}':
			if depth--; depth == 2 && inArray && text[i] == '}' {
				calls, to = calls+1, i+1
			}
		}
	}
	return calls, from, to
}
