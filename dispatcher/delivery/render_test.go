package delivery

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/test/check"
	"github.com/posthorn/posthorn/test/wait"
)

// Render makes the bytes that a receiver gets.
func TestRenderedRequestsAreSent(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	got := make(chan []byte, 1)
	go func() {
		c, err := l.Accept()
		if err != nil {
			return
		}
		defer c.Close()
		var all bytes.Buffer
		q, err := http.ReadRequest(bufio.NewReader(io.TeeReader(c, &all)))
		if err != nil {
			return
		}
		_, _ = io.Copy(io.Discard, q.Body)
		_, _ = io.WriteString(c, "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n")
		got <- all.Bytes()
	}()
	d := dest("crm", "http://"+l.Addr().String()+"/in?x=1")
	d.Endpoints[0].Headers = []liveconfig.Header{{Name: "X-Env", Value: liveconfig.NewSecret("prod")}}
	d.Signing = liveconfig.SigningSchemes{{Type: liveconfig.HMACSHA1, Secret: liveconfig.NewSecret("s3cr3t"),
		Previous: liveconfig.NewSecret("old")}}
	m := queue.Message{Source: "ns/web", ID: "ä 1", Type: "track", AcceptedAt: time.Now(), LongNumbers: true, Body: []byte(`{"n":12345678901234567890}`)}

	requests, err := Render("ns", &d, &m, time.Now())
	check.NoError(t, "render", err)
	check.Equal(t, "rendered requests", len(requests), 1)
	r := requests[0]
	check.Equal(t, "endpoint", r.Endpoint, "e0")
	check.Equal(t, "URL", r.URL, d.Endpoints[0].URL.Reveal())
	check.Equal(t, "body", string(r.Body), `{"n":"12345678901234567890"}`)
	text := r.Method + " /in?x=1 HTTP/1.1\r\n"
	for _, h := range r.Headers {
		text += h.Name + ": " + h.Value + "\r\n"
	}

	w := &world{T: t, store: newTestStore(t)}
	w.engine = run(t, w.store)
	w.apply(d)
	if _, err := w.store.Append(context.Background(), []queue.Message{m}); err != nil {
		t.Fatal(err)
	}
	wait.True(t, "the message is delivered", func() bool { return w.report("crm").Delivered == 1 })
	if sent := string(<-got); sent != text+"\r\n"+string(r.Body) {
		t.Errorf("sent:\n%s\nrendered:\n%s\r\n%s", sent, text, r.Body)
	}
}

// An access token is not requested.
func TestRenderWithoutAToken(t *testing.T) {
	d := dest("crm", "https://hooks.example/in")
	d.Endpoints[0].OAuth2 = &liveconfig.OAuth2{TokenURL: "https://login.invalid/", ClientID: "a", ClientSecret: liveconfig.NewSecret("b")}
	requests, err := Render("ns", &d, &queue.Message{Source: "ns/web", ID: "m1", Type: "track", Body: []byte(`{}`)}, time.Now())
	check.NoError(t, "render", err)
	if text := fmt.Sprint(requests[0].Headers); !strings.Contains(text, "{Authorization Bearer posthorn-placeholder}") {
		t.Errorf("headers: got %s, want a placeholder for the token", text)
	}
}
