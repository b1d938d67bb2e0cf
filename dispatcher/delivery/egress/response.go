package egress

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"net/http"
	"strconv"
	"strings"
	"time"
)

const (
	maxHeadBytes   = 64 << 10 // for all heads of a response, with 1xx responses, chunk lines and trailers
	maxBodyBytes   = 64 << 10 // read of a body, so that the connection can be reused
	maxInterim     = 8        // 1xx responses before the final one
	maxKeptBytes   = 4 << 10  // kept of a body until it is redacted
	maxShownBytes  = 1 << 10  // kept after
	maxRetryAfter  = 24 * time.Hour
	keepAliveSlack = time.Second // for a request in flight when the endpoint's timer ends
)

// protocolError is a response that is not valid HTTP. Its text is fixed and contains no data of the
// endpoint.
type protocolError string

func (e protocolError) Error() string { return string(e) }

// errEnough ends the reading of a long body.
var errEnough = errors.New("enough read")

// answer is the head of the final response, and whether the connection can be reused.
type answer struct {
	status     int
	retryAfter string
	keep       bool
	maxIdle    time.Duration // from Keep-Alive: timeout; 0 unknown

	// byProxy is true if the head has a mark of a proxy's own error page.
	byProxy bool

	// headers are the first values of the final head's headers by lower-case names; nil if they are not kept.
	headers map[string]string

	http10, close, chunked bool
	length                 int64 // -1: not given
}

// readAnswer reads one response, strictly. The first byte has arrived.
//
// A failure counts as soon as its head is read; a 2xx must be complete, because a proxy may send
// the head before the receiver is done.
//
// keep is the number of bytes of the body of a 2xx that are needed, with its headers; 0 for none of both.
func readAnswer(r *bufio.Reader, body *sink, keep int) (answer, error) {
	budget := maxHeadBytes
	var a answer
	var err error
	for interim := 0; ; interim++ {
		if a, err = readHead(r, &budget, keep > 0); err != nil {
			return a, err
		}
		if a.status >= 200 {
			break
		}
		if a.status == http.StatusSwitchingProtocols || interim == maxInterim {
			return a, protocolError("too many interim (1xx) answers, or one that was not asked for")
		}
	}
	success := a.status/100 == 2
	*body = sink{kept: body.kept[:0], left: maxBodyBytes, want: keep}
	if !success {
		body.want = maxKeptBytes
	}
	end := true // the body's end is marked, and is not the end of the connection
	switch {
	case a.status == http.StatusNoContent || a.status == http.StatusNotModified:
	case a.chunked:
		err = readChunks(r, body, &budget)
	case a.length >= 0:
		err = body.take(r, a.length)
	default:
		end = false
		err = body.takeAll(r)
	}
	a.keep = err == nil && end && !a.close && !a.http10 && r.Buffered() == 0
	if err != nil && success && !errors.Is(err, errEnough) {
		return a, err
	}
	return a, nil
}

// readHead reads a status line and the headers after it.
func readHead(r *bufio.Reader, budget *int, keep bool) (answer, error) {
	a := answer{length: -1}
	if keep {
		a.headers = map[string]string{}
	}
	line, err := readLine(r, budget)
	if errors.Is(err, bufio.ErrBufferFull) {
		return a, protocolError("the status line is too long")
	}
	if err != nil {
		return a, err
	}
	// HTTP/1.x NNN, then the end of the line, or a space and any text.
	if len(line) < 12 || string(line[:7]) != "HTTP/1." || line[7] < '0' || line[7] > '9' || line[8] != ' ' ||
		len(line) > 12 && line[12] != ' ' {
		return a, protocolError(notHTTP(line))
	}
	a.http10 = line[7] == '0'
	for _, d := range line[9:12] {
		if d < '0' || d > '9' {
			return a, protocolError("the status is not a number of three digits")
		}
		a.status = a.status*10 + int(d-'0')
	}
	if a.status < 100 || a.status > 599 {
		return a, protocolError("the status is not a number from 100 to 599")
	}
	first := true
	for {
		line, err := readLine(r, budget)
		long := errors.Is(err, bufio.ErrBufferFull)
		if err != nil && !long {
			return a, err
		}
		if len(line) == 0 {
			break
		}
		if line[0] == ' ' || line[0] == '\t' { // a folded header continues the previous line
			if first {
				return a, protocolError("a header line begins with a space")
			}
			a.close = true
		} else if err := a.header(line, long); err != nil {
			return a, err
		}
		first = false
		for long { // the rest of an irrelevant header
			_, err = readLine(r, budget)
			if long = errors.Is(err, bufio.ErrBufferFull); err != nil && !long {
				return a, err
			}
		}
	}
	if a.chunked && (a.length >= 0 || a.http10) {
		a.length, a.close = -1, true // two contradicting ends: the rest of the connection is unusable
	}
	return a, nil
}

func notHTTP(line []byte) string {
	if len(line) > 1 && line[0] >= 0x14 && line[0] <= 0x17 && line[1] == 3 {
		return "it is TLS; use an https URL"
	}
	return "it does not begin with an HTTP/1.x status line"
}

// header parses one header line; long if line is only its start.
func (a *answer) header(line []byte, long bool) error {
	colon := bytes.IndexByte(line, ':')
	if colon <= 0 {
		return protocolError("a header line has no name")
	}
	name, value := line[:colon], bytes.Trim(line[colon+1:], " \t")
	for _, b := range name {
		if !validNameByte(b) {
			return protocolError("a header's name holds a character that is not allowed")
		}
	}
	if a.headers != nil && !long {
		name := strings.ToLower(string(name))
		if _, ok := a.headers[name]; !ok {
			a.headers[name] = strings.ToValidUTF8(string(value), "\uFFFD")
		}
	}
	// The length distinguishes most headers from the relevant ones.
	var field string
	switch len(name) {
	case len("Connection"): // and Keep-Alive
		field = is(name, "connection", "keep-alive")
	case len("Retry-After"):
		field = is(name, "retry-after")
	case len("Content-Length"):
		field = is(name, "content-length")
	// The marks of a proxy's own error page: by tinyproxy, RFC 9209 and squid.
	case len("Server"):
		a.byProxy = a.byProxy || is(name, "server") != "" && bytes.HasPrefix(value, []byte("tinyproxy/"))
	case len("Proxy-Status"):
		a.byProxy = a.byProxy || is(name, "proxy-status") != "" && bytes.Contains(value, []byte("error="))
	case len("X-Squid-Error"):
		a.byProxy = a.byProxy || is(name, "x-squid-error") != ""
	case len("Transfer-Encoding"):
		field = is(name, "transfer-encoding")
	}
	if field != "" && long {
		return protocolError("a header for the response's length is too long")
	}
	switch field {
	case "connection":
		for token := range bytes.SplitSeq(value, []byte(",")) {
			if is(bytes.TrimSpace(token), "close") != "" {
				a.close = true
			}
		}
	case "keep-alive":
		a.maxIdle = keepAliveTimeout(value)
	case "retry-after":
		if a.retryAfter == "" {
			a.retryAfter = string(value)
		}
	case "content-length":
		n, ok := parseLength(value)
		if !ok || a.length >= 0 && a.length != n {
			return protocolError("the Content-Length is not one number")
		}
		a.length = n
	case "transfer-encoding":
		if a.chunked || is(value, "chunked") == "" {
			return protocolError("the Transfer-Encoding is not chunked")
		}
		a.chunked = true
	}
	return nil
}

// is returns the word that equals b, ignoring case, or "". The words are in lower case.
func is(b []byte, words ...string) string {
	for _, w := range words {
		if len(b) == len(w) && bytes.EqualFold(b, []byte(w)) {
			return w
		}
	}
	return ""
}

func parseLength(b []byte) (n int64, ok bool) {
	if len(b) == 0 || len(b) > 18 {
		return 0, false
	}
	for _, d := range b {
		if d < '0' || d > '9' {
			return 0, false
		}
		n = n*10 + int64(d-'0')
	}
	return n, true
}

// keepAliveTimeout parses "timeout=5, max=100".
func keepAliveTimeout(value []byte) time.Duration {
	for part := range bytes.SplitSeq(value, []byte(",")) {
		key, seconds, _ := bytes.Cut(bytes.TrimSpace(part), []byte("="))
		if n, ok := parseLength(seconds); ok && n < 1e6 && is(key, "timeout") != "" {
			return max(time.Duration(n)*time.Second-keepAliveSlack, time.Millisecond)
		}
	}
	return 0
}

func readChunks(r *bufio.Reader, body *sink, budget *int) error {
	for {
		line, err := readChunkLine(r, budget)
		if errors.Is(err, bufio.ErrBufferFull) {
			return protocolError("a chunk's size line is too long")
		}
		if err != nil {
			return err
		}
		size, _, _ := bytes.Cut(line, []byte(";"))
		size = bytes.TrimRight(size, " \t")
		if len(size) == 0 || len(size) > 15 {
			return protocolError("a chunk's size is not a hexadecimal number")
		}
		var n int64
		for _, d := range size {
			switch {
			case d >= '0' && d <= '9':
				d -= '0'
			case d|0x20 >= 'a' && d|0x20 <= 'f':
				d = d | 0x20 - 'a' + 10
			default:
				return protocolError("a chunk's size is not a hexadecimal number")
			}
			n = n<<4 | int64(d)
		}
		if n > 0 {
			if err := body.take(r, n); err != nil {
				return err
			}
		}
		// After the last chunk: trailers, up to an empty line.
		for {
			line, err := readChunkLine(r, budget)
			switch {
			case errors.Is(err, bufio.ErrBufferFull) || err == nil && len(line) > 0 && n > 0:
				return protocolError("a chunk is longer than its size, or a trailer is too long")
			case err != nil:
				return err
			}
			if len(line) == 0 {
				break
			}
			if err := (&answer{length: -1}).header(line, false); err != nil {
				return err
			}
		}
		if n == 0 {
			return nil
		}
	}
}

// readLine returns the next line without its end, valid until the next read. With
// bufio.ErrBufferFull it is only the start of the line. Lines of a head may end with a bare line
// feed.
func readLine(r *bufio.Reader, budget *int) ([]byte, error) {
	line, err := readLineFeed(r, budget)
	return bytes.TrimSuffix(line, []byte("\r")), err
}

// readChunkLine is readLine, but a bare line feed does not end a line: programs that disagree on
// that see different responses.
func readChunkLine(r *bufio.Reader, budget *int) ([]byte, error) {
	line, err := readLineFeed(r, budget)
	if err != nil {
		return line, err
	}
	line, ok := bytes.CutSuffix(line, []byte("\r"))
	if !ok || bytes.IndexByte(line, '\r') >= 0 {
		return nil, protocolError("a line of a chunked body does not end with CR LF")
	}
	return line, nil
}

func readLineFeed(r *bufio.Reader, budget *int) ([]byte, error) {
	line, err := r.ReadSlice('\n')
	if *budget -= len(line); *budget < 0 {
		return nil, protocolError("its headers are larger than 64 KiB")
	}
	switch {
	case err == nil:
		return line[:len(line)-1], nil
	case errors.Is(err, io.EOF):
		return nil, io.ErrUnexpectedEOF
	}
	return line, err
}

// sink reads a body, keeps its first bytes and stops at its limit.
type sink struct {
	kept []byte
	want int   // how many bytes to keep
	left int64 // how many bytes to read
}

// whole reports whether the kept bytes are all that were read.
func (s *sink) whole() bool { return maxBodyBytes-s.left == int64(len(s.kept)) }

func (s *sink) take(r *bufio.Reader, n int64) error {
	short := n > s.left
	if n = min(n, s.left); short && s.want == 0 {
		return errEnough // the body is not needed, and the connection cannot be reused
	}
	s.left -= n
	if k := min(s.want-len(s.kept), int(n)); k > 0 {
		have := len(s.kept)
		s.kept = append(s.kept, make([]byte, k)...)
		got, err := io.ReadFull(r, s.kept[have:])
		s.kept = s.kept[:have+got]
		if err != nil {
			return unexpectedEOF(err)
		}
		n -= int64(k)
	}
	if _, err := r.Discard(int(n)); err != nil {
		return unexpectedEOF(err)
	}
	if short {
		return errEnough
	}
	return nil
}

// takeAll reads until the connection ends.
func (s *sink) takeAll(r *bufio.Reader) error {
	for {
		if _, err := r.Peek(1); errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return nil
		} else if err != nil {
			return err
		}
		if err := s.take(r, int64(r.Buffered())); err != nil {
			return err
		}
		if s.left == 0 {
			return errEnough
		}
	}
}

func unexpectedEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

// parseRetryAfter parses both forms, seconds and an HTTP date. It returns 0 for an invalid value or
// a time in the past.
func parseRetryAfter(value string, now time.Time) time.Duration {
	if value == "" {
		return 0
	}
	if allDigits(value) {
		seconds, err := strconv.ParseInt(value, 10, 64)
		if err != nil || seconds > int64(maxRetryAfter/time.Second) {
			return maxRetryAfter
		}
		return time.Duration(seconds) * time.Second
	}
	at, err := http.ParseTime(value)
	if err != nil {
		return 0
	}
	return min(max(at.Sub(now), 0), maxRetryAfter)
}

func allDigits(s string) bool {
	for _, r := range s {
		if r < '0' || r > '9' {
			return false
		}
	}
	return true
}
