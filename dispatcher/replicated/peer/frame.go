package peer

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
)

// frame is a request in a stream, or the answer to it. Its head and its body have their lengths before them, as
// fixed numbers of 4 bytes. The head has number, status, target, host and the number of header lines, then the
// name and the value of each line: numbers as uvarints, texts after their lengths.
type frame struct {
	// number is the request's number in its stream, also in its answer.
	number uint64
	// status is the status of an answer.
	status int
	// target and host belong to a request.
	target, host string
	header       http.Header
	body         []byte
}

const (
	lengthBytes = 4
	// maxHead bounds the head of a frame. It is larger than the head of any request: the server of the client accepts
	// at most 64 KB of target and header, and escaping makes the target at most three times as long.
	maxHead = 256 << 10
)

var errFrame = errors.New("the stream has a frame in an unknown format")

// append appends the encoded frame.
func (f *frame) append(b []byte) []byte {
	begin := len(b)
	b = append(b, make([]byte, 2*lengthBytes)...)
	b = binary.AppendUvarint(b, f.number)
	b = binary.AppendUvarint(b, uint64(f.status)) //nolint:gosec // never negative
	b = appendText(b, f.target)
	b = appendText(b, f.host)
	lines := 0
	for _, values := range f.header {
		lines += len(values)
	}
	b = binary.AppendUvarint(b, uint64(lines)) //nolint:gosec // never negative
	for name, values := range f.header {
		for _, value := range values {
			b = appendText(appendText(b, name), value)
		}
	}
	binary.BigEndian.PutUint32(b[begin:], uint32(len(b)-begin-2*lengthBytes)) //nolint:gosec // a few KB
	binary.BigEndian.PutUint32(b[begin+lengthBytes:], uint32(len(f.body)))    //nolint:gosec // at most 1 MB
	return append(b, f.body...)
}

func appendText(b []byte, text string) []byte {
	return append(binary.AppendUvarint(b, uint64(len(text))), text...)
}

// readFrame reads a frame with a body of at most maxBody bytes.
func readFrame(in *bufio.Reader, maxBody uint32) (f frame, err error) {
	lengths, err := in.Peek(2 * lengthBytes)
	if err != nil {
		return f, cut(err, len(lengths) > 0)
	}
	head, body := binary.BigEndian.Uint32(lengths), binary.BigEndian.Uint32(lengths[lengthBytes:])
	if head > maxHead || body > maxBody {
		return f, fmt.Errorf("the stream has a frame with a head of %d and a body of %d bytes, more than %d and %d", head, body, maxHead, maxBody)
	}
	_, _ = in.Discard(2 * lengthBytes)
	all := make([]byte, head+body)
	if _, err := io.ReadFull(in, all); err != nil {
		return f, cut(err, true)
	}
	f.body = all[head:]
	r := headReader{all[:head], string(all[:head])}
	f.number, f.status, f.target, f.host = r.number(), int(r.number()), r.string(), r.string() //nolint:gosec // an HTTP status
	lines := min(r.number(), uint64(len(r.left)))
	f.header = make(http.Header, lines)
	values := make([]string, 0, lines)
	for range lines {
		name, value := r.string(), r.string()
		if more := f.header[name]; more != nil {
			f.header[name] = append(more, value)
			continue
		}
		values = append(values, value)
		f.header[name] = slices.Clip(values[len(values)-1:])
	}
	if r.text == "" || len(r.left) > 0 {
		return f, errFrame
	}
	return f, nil
}

// cut returns the error of a stream, which has no end within a frame.
func cut(err error, within bool) error {
	if within && errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// headReader reads a head. It has no text after an error.
type headReader struct {
	left []byte
	text string
}

func (r *headReader) number() uint64 {
	n, size := binary.Uvarint(r.left)
	if size <= 0 {
		*r = headReader{}
		return 0
	}
	r.left = r.left[size:]
	return n
}

func (r *headReader) string() string {
	n := r.number()
	if n > uint64(len(r.left)) {
		*r = headReader{}
		return ""
	}
	begin := len(r.text) - len(r.left)
	r.left = r.left[n:]
	return r.text[begin : begin+int(n)] //nolint:gosec // n <= len(r.left)
}

// streamedRequest is a request that was read from a stream, with its number.
type streamedRequest struct {
	number uint64
	*http.Request
}

// readStreamed reads a request of a stream with its body.
func readStreamed(in *bufio.Reader) (q streamedRequest, err error) {
	f, err := readFrame(in, streamedBytes)
	if err != nil {
		return q, err
	}
	target, err := url.ParseRequestURI(f.target)
	if err != nil {
		return q, err
	}
	q.number = f.number
	q.Request = &http.Request{
		Method: http.MethodPost, URL: target, RequestURI: f.target, Host: f.host, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: f.header, ContentLength: int64(len(f.body)), Body: http.NoBody,
	}
	if len(f.body) > 0 {
		q.Body = io.NopCloser(bytes.NewReader(f.body))
	}
	return q, nil
}
