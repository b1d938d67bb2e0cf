package analytics

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"sync"
	"time"
)

// outcome is the result of a batch.
type outcome struct {
	err      error         // of the whole batch; nil: accepted
	rejected map[int]error // calls of an accepted batch that the server rejected
	again    bool          // err may be temporary
	tooLarge bool          // a smaller batch may succeed
	after    time.Duration // the wait that the server requested; 0: none
}

// of returns the error of one call.
func (o outcome) of(i int) error {
	if o.err != nil {
		return o.err
	}
	return o.rejected[i]
}

// first returns one error as an example.
func (o outcome) first() error {
	if o.err != nil {
		return o.err
	}
	for _, err := range o.rejected {
		return err
	}
	return nil
}

// retryable reports whether a status is temporary.
func retryable(status int) bool {
	return status == http.StatusRequestTimeout || status == http.StatusTooManyRequests || status >= 500
}

// retryIn decides whether, and after which time, a batch is sent again.
func (c *Client) retryIn(b *batch, out outcome) (time.Duration, bool) {
	if !out.again {
		return 0, false
	}
	wait := out.after
	if wait == 0 {
		// Full jitter: clients that failed at the same time retry at different times.
		wait = time.Duration(rand.Float64() * float64(Backo.Duration(b.attempts-1)))
	}
	if time.Since(b.first)+wait > c.retryFor {
		return 0, false
	}
	c.log.Log(c.life, c.diagnosis, "batch will be retried", "calls", len(b.items), "attempts", b.attempts, "in", wait, "error", out.err)
	return wait, true
}

// send makes one request.
func (c *Client) send(b *batch) outcome {
	ctx, cancel := context.WithTimeout(c.life, c.requestTimeout)
	defer cancel()

	sentAt := time.Now()
	text := append(b.body, ']')
	if len(c.context) > 0 {
		text = append(append(text, `,"context":`...), c.context...)
	}
	text = appendUUID(append(text, `,"messageId":"`...), sentAt)
	// Set for each attempt: the server corrects the calls' timestamps by it.
	text = sentAt.UTC().AppendFormat(append(text, `","sentAt":"`...), timeLayout)
	text = append(text, `"}`...)

	encoding := ""
	if c.gzip && len(text) >= 1<<10 {
		packed := pack(text)
		defer packers.Put(packed)
		if packed.out.Len() < len(text) {
			text, encoding = packed.out.Bytes(), "gzip"
		}
	}
	// The transport may still read after it has returned a response. It must not see later contents
	// of the buffer.
	data := &payload{data: text}
	defer data.revoke()

	req, err := http.NewRequestWithContext(ctx, http.MethodPost, c.url, data.reader())
	if err != nil {
		return outcome{err: fmt.Errorf("analytics: %w", err)}
	}
	req.ContentLength = int64(len(text))
	req.GetBody = func() (io.ReadCloser, error) { return data.reader(), nil }
	req.Header["Authorization"] = []string{c.authorization}
	req.Header["Content-Type"] = []string{"application/json"}
	req.Header["User-Agent"] = []string{"posthorn-go/" + Version}
	if encoding != "" {
		req.Header["Content-Encoding"] = []string{encoding}
	}
	if b.attempts > 0 {
		req.Header["X-Retry-Count"] = []string{strconv.Itoa(b.attempts)}
	}
	res, err := c.Client.Do(req)
	if err != nil {
		return c.unanswered(err)
	}
	defer res.Body.Close()
	return c.answered(res, len(b.items))
}

// unanswered returns the outcome of a request without a response.
func (c *Client) unanswered(err error) outcome {
	if e := new(url.Error); errors.As(err, &e) {
		err = e.Err // without the address
	}
	if c.life.Err() != nil {
		return outcome{err: closedError{cause: fmt.Errorf("request cancelled, the call may have arrived: %w", err)}}
	}
	return outcome{err: fmt.Errorf("analytics: no response from the server: %w", err), again: true}
}

// answer is the body of the server's response.
type answer struct {
	Error struct {
		Code    string `json:"code"`
		Message string `json:"message"`
	} `json:"error"`
	Rejected []struct {
		Index   int    `json:"index"`
		Code    string `json:"code"`
		Message string `json:"message"`
	} `json:"rejected"`
}

// maxAnswer bounds the bytes read of a response: 2500 rejections fit.
const maxAnswer = 1 << 20

func (c *Client) answered(res *http.Response, calls int) outcome {
	// An unreadable body adds no information to the status.
	body, _ := io.ReadAll(io.LimitReader(res.Body, maxAnswer))
	var a answer
	parsed := json.Unmarshal(body, &a) == nil
	if res.StatusCode < 200 || res.StatusCode > 299 {
		e := &ResponseError{StatusCode: res.StatusCode, Code: a.Error.Code, Message: a.Error.Message}
		if !parsed {
			e.Message = oneLine(body)
		}
		out := outcome{err: e, again: retryable(res.StatusCode), tooLarge: res.StatusCode == http.StatusRequestEntityTooLarge}
		if out.again {
			out.after = retryAfter(res.Header.Get("Retry-After"), time.Now())
		}
		return out
	}
	var out outcome
	for _, r := range a.Rejected {
		if r.Index < 0 || r.Index >= calls {
			continue
		}
		if out.rejected == nil {
			out.rejected = make(map[int]error, len(a.Rejected))
		}
		out.rejected[r.Index] = &RejectedError{Code: r.Code, Message: r.Message}
	}
	return out
}

// oneLine makes a response text usable in an error.
func oneLine(body []byte) string {
	return strings.Join(strings.Fields(strings.ToValidUTF8(string(body[:min(len(body), 200)]), "")), " ")
}

// retryAfter parses the header's two forms: seconds, and a date.
func retryAfter(value string, now time.Time) time.Duration {
	if value == "" {
		return 0
	}
	if seconds, err := strconv.ParseUint(value, 10, 31); err == nil {
		return time.Duration(seconds) * time.Second
	}
	if at, err := http.ParseTime(value); err == nil {
		return max(at.Sub(now), 0)
	}
	return 0
}

// payload is a request's body until it is revoked.
type payload struct {
	mu   sync.Mutex
	data []byte
}

func (p *payload) reader() *payloadReader { return &payloadReader{from: p} }

// revoke makes all further reads fail.
func (p *payload) revoke() {
	p.mu.Lock()
	p.data = nil
	p.mu.Unlock()
}

type payloadReader struct {
	from *payload
	at   int
}

var errRevoked = errors.New("analytics: the request has ended")

func (r *payloadReader) Read(into []byte) (int, error) {
	r.from.mu.Lock()
	defer r.from.mu.Unlock()
	if r.from.data == nil {
		return 0, errRevoked
	}
	if r.at == len(r.from.data) {
		return 0, io.EOF
	}
	n := copy(into, r.from.data[r.at:])
	r.at += n
	return n, nil
}

func (r *payloadReader) Close() error { return nil }

// packer compresses bodies.
type packer struct {
	out bytes.Buffer
	zip *gzip.Writer
}

var packers = sync.Pool{New: func() any {
	p := new(packer)
	p.zip, _ = gzip.NewWriterLevel(&p.out, gzip.BestSpeed) // the level is valid
	return p
}}

func pack(text []byte) *packer {
	p := packers.Get().(*packer)
	p.out.Reset()
	p.zip.Reset(&p.out)
	// Writing to a buffer does not fail.
	p.zip.Write(text) //nolint:errcheck // see above
	p.zip.Close()
	return p
}
