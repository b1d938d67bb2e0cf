package cli

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/spf13/cobra"

	"github.com/posthorn/posthorn/cmd/internal/command"
	"github.com/posthorn/posthorn/internal/plural"
	"github.com/posthorn/posthorn/internal/termsafe"
)

func newSink() *cobra.Command {
	var s sink
	var listen, secretFile string
	cmd := &cobra.Command{
		Use:   "sink",
		Short: "Receive webhooks, verify their signatures and print them",
		Long: `A reference receiver. It answers every POST, checks the signature if --secret-value is
set, and prints a line per message: its type, its user, and whether the signature
is authentic. A missing or wrong signature is answered 401. With --header, the
signature of the scheme HMAC in this header is checked.

--status-code, --delay and --fail-first simulate a failing receiver. --save keeps each
authentic request in a file, and --forward-to sends it on to a receiver that you
develop, whose status is then the answer.`,
		Example: `  posthorn sink --listen 127.0.0.1:9000 --secret-value "$SECRET"
  posthorn sink --status-code 503         a receiver that is down
  posthorn sink --fail-first 20           one that recovers
  posthorn sink --secret-value "$SECRET" --save requests --forward-to http://localhost:3000/hook`,
		Args: command.ExactArgs(),
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			if s.secret, err = secretFrom(s.secret, secretFile); err != nil {
				return err
			}
			if s.status < 100 || s.status > 599 {
				return command.Usagef("--status-code %d: use an HTTP status between 100 and 599", s.status)
			}
			if err := s.format.validate(); err != nil {
				return err
			}
			if err := checkForwardTo(s.forwardTo); err != nil {
				return err
			}
			if s.save != "" {
				if err := os.MkdirAll(s.save, 0o700); err != nil {
					return command.UsageError(err)
				}
			}
			if _, _, err := net.SplitHostPort(listen); err != nil {
				return command.Usagef("--listen %q: use HOST:PORT or :PORT, for example :9000", listen)
			}
			listener, err := net.Listen("tcp", listen)
			if err != nil {
				return err
			}
			s.out = cmd.OutOrStdout()
			if s.output == "text" {
				fmt.Fprintf(cmd.ErrOrStderr(), "receiving on http://%s (%s); stop with Ctrl-C\n", listener.Addr(), s.mode())
			}
			s.serve(cmd.Context(), listener)
			if s.output == "text" {
				fmt.Fprintf(cmd.ErrOrStderr(), "%d received, %d authentic, %d refused\n", s.received, s.authentic, s.refused)
			}
			if s.bad > 0 {
				return command.ErrFailed
			}
			return nil
		},
	}
	f := cmd.Flags()
	f.StringVar(&listen, "listen", "127.0.0.1:9000", "address of the receiver")
	f.StringVar(&s.secret, "secret-value", "", "the shared secret; without it signatures are printed but not checked")
	f.StringVar(&secretFile, "secret-file", "", "a file that holds the shared secret, byte for byte")
	f.IntVar(&s.status, "status-code", http.StatusOK, "status to answer with")
	f.DurationVar(&s.delay, "delay", 0, "time to wait before the answer")
	f.IntVar(&s.failFirst, "fail-first", 0, "answer this many requests with 503 before the first success")
	f.StringVar(&s.save, "save", "", "a folder that gets a file for each authentic request: its headers and its body, as HTTP")
	f.StringVar(&s.forwardTo, "forward-to", "", "send each authentic request on to this URL, and answer with its status")
	s.format.addFlags(cmd)
	command.ColorFlag(cmd)
	command.OutputFlag(cmd, &s.output, "text", "text, json (one object per line, with the body) or none", "text", "json", "none")
	return cmd
}

// sink is a receiver of webhooks.
type sink struct {
	secret    string
	format    hmacFormat
	status    int
	delay     time.Duration
	failFirst int
	// save is a folder for the requests, forwardTo the URL of another receiver; "" is none.
	save, forwardTo string
	output          string
	out             io.Writer
	// onMessage, when set, is called for every accepted message.
	onMessage func(message)

	mu sync.Mutex
	// bad counts missing and wrong signatures; the other refusals were requested by flags.
	received, authentic, refused, bad int
}

// message is the printed form of a request.
type message struct {
	Time   time.Time `json:"time"`
	Path   string    `json:"path"`
	Type   string    `json:"type"`
	Event  string    `json:"event,omitempty"`
	UserID string    `json:"userId,omitempty"`
	// Messages is the number of messages of a batch, whose body is an array here; 0 for a single message.
	Messages  int    `json:"messages,omitempty"`
	Signature string `json:"signature"`
	Status    int    `json:"status"`
	// Problem is why the request was not saved or sent on.
	Problem string          `json:"problem,omitempty"`
	Body    json.RawMessage `json:"body"`
}

func (s *sink) mode() string {
	if s.secret == "" {
		return "signatures are not checked: no --secret-value"
	}
	return "checking signatures"
}

func (s *sink) serve(ctx context.Context, l net.Listener) {
	server := &http.Server{Handler: s, ReadHeaderTimeout: 5 * time.Second}
	stop := context.AfterFunc(ctx, func() {
		grace, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		_ = server.Shutdown(grace)
	})
	defer stop()
	_ = server.Serve(l)
}

// readWebhook reads a body, which may be compressed. The header of a compressed body is removed, so that it can be forwarded.
func readWebhook(w http.ResponseWriter, r *http.Request) ([]byte, error) {
	body := http.MaxBytesReader(w, r.Body, maxWebhook)
	if r.Header.Get("Content-Encoding") != "gzip" {
		return io.ReadAll(body)
	}
	r.Header.Del("Content-Encoding")
	inflated, err := gzip.NewReader(body)
	if err != nil {
		return nil, err
	}
	return io.ReadAll(http.MaxBytesReader(w, inflated, maxWebhook))
}

// maxWebhook bounds a body, in bytes. It is larger than each batch.
const maxWebhook = 5 << 20

// ServeHTTP receives one webhook.
func (s *sink) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodPost {
		w.Header().Set("Allow", http.MethodPost)
		http.Error(w, "this sink accepts POST only", http.StatusMethodNotAllowed)
		return
	}
	body, err := readWebhook(w, r)
	if err != nil {
		http.Error(w, "cannot read the body", http.StatusBadRequest)
		return
	}
	if s.delay > 0 {
		select {
		case <-time.After(s.delay):
		case <-r.Context().Done():
		}
	}
	m := message{Time: time.Now().UTC(), Path: r.URL.Path, Status: s.status, Body: body}
	var call struct {
		Type, Event string
		UserID      string `json:"userId"`
		AnonymousID string `json:"anonymousId"`
	}
	if strings.HasPrefix(r.Header.Get("Content-Type"), "application/x-ndjson") {
		m.Body = slices.Concat([]byte("["), bytes.ReplaceAll(bytes.TrimSpace(body), []byte("\n"), []byte(",")), []byte("]"))
	}
	var batch []json.RawMessage
	valid := json.Unmarshal(m.Body, &call) == nil || json.Unmarshal(m.Body, &batch) == nil
	m.Type, m.Event, m.UserID, m.Messages = call.Type, call.Event, cmp.Or(call.UserID, call.AnonymousID), len(batch)
	switch problem := s.check(r.Header, body); {
	case s.secret == "" && r.Header.Get("X-Signature")+r.Header.Get("webhook-signature")+r.Header.Get(s.format.header) == "":
		m.Signature = "none"
	case s.secret == "":
		m.Signature = "not checked"
	case problem != "":
		m.Signature = "BAD: " + problem
	default:
		m.Signature = "ok"
	}

	s.mu.Lock()
	defer s.mu.Unlock()
	s.received++
	switch {
	case strings.HasPrefix(m.Signature, "BAD"):
		m.Status = http.StatusUnauthorized
		s.bad++
	case s.failFirst > 0:
		s.failFirst--
		m.Status = http.StatusServiceUnavailable
	default:
		if s.save != "" {
			if err := s.saveRequest(r.Header, body); err != nil {
				m.Problem = "not saved: " + err.Error()
			}
		}
		if s.forwardTo != "" && m.Status < 300 {
			// Requests are sent on one after the other, in the order of the printed lines.
			var err error
			if m.Status, err = s.forward(r, body); err != nil {
				m.Problem = "not sent on: " + err.Error()
			}
		}
	}
	if m.Signature == "ok" {
		s.authentic++
	}
	if m.Status >= 300 {
		s.refused++
	} else if s.onMessage != nil {
		s.onMessage(m)
	}
	if !valid {
		m.Body, _ = json.Marshal(string(body))
	}
	s.print(m)
	w.WriteHeader(m.Status)
	if m.Messages > 0 {
		_, _ = io.WriteString(w, "{}") // With response: PerItem it rejects no message.
	}
}

// saveRequest writes a request to a file whose name has its number.
func (s *sink) saveRequest(h http.Header, body []byte) error {
	var text bytes.Buffer
	_ = h.Write(&text) // A buffer returns no error.
	text.WriteString("\r\n")
	text.Write(body)
	return os.WriteFile(filepath.Join(s.save, fmt.Sprintf("%06d.http", s.received)), text.Bytes(), 0o600)
}

// forward sends a request to another receiver, with its headers, and returns the status of the answer.
func (s *sink) forward(r *http.Request, body []byte) (status int, err error) {
	h := http.Header{}
	for name, values := range r.Header {
		switch name {
		case "Connection", "Content-Length", "Transfer-Encoding":
		default:
			h[name] = values
		}
	}
	return sendOn(r.Context(), s.forwardTo, h, body)
}

// checkForwardTo fails for a value of --forward-to that is neither empty nor an HTTP URL.
func checkForwardTo(text string) error {
	if u, err := url.Parse(text); text != "" && (err != nil || u.Host == "" || u.Scheme != "http" && u.Scheme != "https") {
		return command.Usagef("--forward-to %q is not a URL like http://localhost:3000/hook", text)
	}
	return nil
}

// sendOn sends a request to another receiver and returns the status of the answer. It follows no
// redirects.
func sendOn(ctx context.Context, to string, h http.Header, body []byte) (status int, err error) {
	ctx, cancel := context.WithTimeout(ctx, forwardTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, to, bytes.NewReader(body))
	if err != nil {
		return http.StatusBadGateway, err
	}
	req.Header = h
	client := http.Client{CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	resp, err := client.Do(req)
	if err != nil {
		return http.StatusBadGateway, err
	}
	defer resp.Body.Close()
	_, _ = io.Copy(io.Discard, io.LimitReader(resp.Body, 1<<20))
	return resp.StatusCode, nil
}

// check returns the reason why a request is not authentic, or "".
func (s *sink) check(h http.Header, body []byte) string {
	if s.format.header == "" {
		return checkRequest(s.secret, h, body)
	}
	id, timestamp := h.Get("webhook-id"), h.Get("webhook-timestamp")
	problem := s.format.check(s.secret, h.Get(s.format.header), id, timestamp, body)
	if previous := h.Get(s.format.header + "-Previous"); problem != "" && previous != "" && s.format.check(s.secret, previous, id, timestamp, body) == "" {
		return ""
	}
	return problem
}

func (s *sink) print(m message) {
	switch s.output {
	case "json":
		line, _ := json.Marshal(m)
		fmt.Fprintf(s.out, "%s\n", termsafe.Escape(line))
	case "text":
		what := m.Type
		if m.Event != "" {
			what += fmt.Sprintf(" %q", m.Event)
		}
		if m.Messages > 0 {
			what = "batch of " + plural.Count(m.Messages, "message")
		}
		if m.Problem != "" {
			m.Problem = "; " + m.Problem
		}
		fmt.Fprintf(s.out, "%s  %-32s user=%-16s signature %s  -> %s%s\n",
			m.Time.Local().Format("15:04:05.000"), what, m.UserID, paint(s.out, m.Signature), paint(s.out, fmt.Sprint(m.Status)), m.Problem)
	}
}

// paint colors an outcome.
func paint(w io.Writer, text string) string {
	c := command.Plain
	switch {
	case text == "ok", strings.HasPrefix(text, "2"):
		c = command.Green
	case strings.HasPrefix(text, "BAD"), strings.HasPrefix(text, "4"), strings.HasPrefix(text, "5"):
		c = command.Red
	}
	return command.Paint(w, c, text)
}
