package delivery

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"log"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/delivery/egress"
	"github.com/posthorn/posthorn/dispatcher/queue"
	"github.com/posthorn/posthorn/dispatcher/queue/pebblestore"
	"github.com/posthorn/posthorn/test/signature"
	"github.com/posthorn/posthorn/test/wait"
)

// run starts an engine with the real client on a store; the cleanup stops it.
func run(t testing.TB, store Store) *Engine {
	policy, err := egress.ParsePolicy([]string{"127.0.0.1"})
	if err != nil {
		t.Fatal(err)
	}
	client := egress.New(egress.Options{Policy: policy})
	e := New(Options{Store: store, Client: client, Logger: slog.New(slog.DiscardHandler)})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		_ = e.Run(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		<-done
		client.Close()
	})
	return e
}

// Real requests: signed messages arrive unchanged; a self-signed receiver gets no request, and
// the report has the reason.
func TestRealClient(t *testing.T) {
	var mu sync.Mutex
	arrived := map[string]bool{}
	receiver := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil || r.Header.Get("X-Signature") != signature.SHA1("s3cr3t", string(body)) || r.Header.Get("User-Agent") != "Posthorn/1.0" ||
			r.Header.Get("Content-Type") != "application/json" {
			t.Errorf("%v %v %s", err, r.Header, body)
			w.WriteHeader(http.StatusBadRequest)
			return
		}
		mu.Lock()
		defer mu.Unlock()
		arrived[r.Header.Get("Idempotency-Key")] = true
	}))
	defer receiver.Close()
	selfSigned := httptest.NewUnstartedServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		t.Error("a self-signed receiver got a request")
	}))
	selfSigned.Config.ErrorLog = log.New(io.Discard, "", 0)
	selfSigned.TLS = &tls.Config{MinVersion: tls.VersionTLS12}
	selfSigned.StartTLS()
	defer selfSigned.Close()

	store := newTestStore(t)
	e := run(t, store)
	w := &world{T: t, store: store, engine: e}
	good, bad := dest("good", receiver.URL+"/hook?token=s3cr3t"), dest("bad", selfSigned.URL)
	good.Signing = liveconfig.SigningSchemes{{Type: liveconfig.HMACSHA1, Secret: liveconfig.NewSecret("s3cr3t")}}
	w.apply(good, bad)
	w.send("web", 500)
	wait.True(t, "all delivered", func() bool { return w.report("good").Delivered == 500 })
	mu.Lock()
	if len(arrived) != 500 {
		t.Errorf("%d messages arrived", len(arrived))
	}
	mu.Unlock()
	wait.True(t, "the certificate is rejected", func() bool {
		f := w.report("bad").Endpoints[0].LastFailure
		return f != nil && f.Reason == string(egress.CertificateRejected)
	})
	if text := fmt.Sprintf("%+v %+v", reports(e), e.Attempts("ns/good", "e0")); strings.Contains(text, "s3cr3t") {
		t.Error("the report contains a secret")
	}
}

// Dead letters do not contain the secrets and the signature that a receiver echoes, and the
// webhook-id of a message depends on its Source.
func TestAnEchoingReceiver(t *testing.T) {
	const secret, previous = "current-s3cr3t", "previous-s3cr3t"
	var mu sync.Mutex
	ids, signatures, withBoth := map[string]bool{}, []string{}, 0
	receiver := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		if id := r.Header.Get("webhook-id"); id != "" {
			ids[id] = true
		}
		signature := strings.TrimSpace(r.Header.Get("X-Signature") + " " + r.Header.Get("webhook-signature"))
		signatures = append(signatures, strings.Fields(strings.ReplaceAll(signature, "v1,", ""))...)
		if r.Header.Get("X-Signature") != "" && r.Header.Get("webhook-signature") != "" {
			withBoth++
		}
		w.WriteHeader(http.StatusBadRequest)
		_, _ = fmt.Fprintf(w, "echo of %s: %s %s %s %x", r.Header.Get("Idempotency-Key"), secret, previous, signature, secret)
	}))
	defer receiver.Close()
	store := newTestStore(t)
	w := &world{T: t, store: store, engine: run(t, store)}
	simple, standard, both := dest("simple", receiver.URL), dest("standard", receiver.URL), dest("both", receiver.URL)
	simple.Signing = liveconfig.SigningSchemes{{Type: liveconfig.HMACSHA1, Secret: liveconfig.NewSecret(secret),
		Previous: liveconfig.NewSecret(previous)}}
	standard.Signing = liveconfig.SigningSchemes{{Type: liveconfig.StandardWebhooks, Secret: liveconfig.NewSecret(secret),
		Previous: liveconfig.NewSecret(previous)}}
	both.Signing = liveconfig.SigningSchemes{{Type: liveconfig.HMACSHA1, Secret: liveconfig.NewSecret(secret)},
		{Type: liveconfig.StandardWebhooks, Secret: liveconfig.NewSecret(previous)}}
	for _, d := range []*liveconfig.Destination{&simple, &standard, &both} {
		d.Delivery.TimeoutMS = 60_000 // Each gets one request.
	}
	w.apply(simple, standard, both)
	w.send("web", 1)
	wait.True(t, "all are dead letters", func() bool {
		return len(w.dead("simple")) == 1 && len(w.dead("standard")) == 1 && len(w.dead("both")) == 1
	})
	mu.Lock()
	defer mu.Unlock()
	if withBoth != 1 {
		t.Errorf("%d requests carry both signatures, want 1", withBoth)
	}
	for _, name := range []string{"simple", "standard", "both"} {
		letter := w.dead(name)[0]
		answer := string(letter.Failure.Response)
		if !strings.HasPrefix(answer, "echo of "+letter.ID+": [redacted]") {
			t.Errorf("%s: the answer is kept as %q", name, answer)
		}
		for _, hidden := range append(signatures, secret, previous, fmt.Sprintf("%x", secret)) {
			if strings.Contains(answer, hidden) {
				t.Errorf("%s: %q is contained in %q", name, hidden, answer)
			}
		}
	}
	if id := w.dead("standard")[0].ID; len(ids) != 1 || !ids[id] {
		t.Errorf("the webhook-ids are %v, want %s", ids, id)
	}
}

// BenchmarkEngine sends 1 KiB messages from the real store through the engine and the real
// client to a receiver in this process; "direct" is a plain loop of posts with as many
// goroutines.
func BenchmarkEngine(b *testing.B) {
	var arrived atomic.Int64
	receiver := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { arrived.Add(1) }))
	defer receiver.Close()
	body := []byte(`{"x":"` + strings.Repeat("y", 1000) + `"}`)
	b.Run("direct", func(b *testing.B) {
		policy, _ := egress.ParsePolicy([]string{"127.0.0.1"})
		client := egress.New(egress.Options{Policy: policy})
		defer client.Close()
		ep, err := client.Prepare(dest("d", receiver.URL).Endpoints[0])
		if err != nil {
			b.Fatal(err)
		}
		b.ReportAllocs()
		b.SetParallelism(32)
		b.RunParallel(func(pb *testing.PB) {
			for pb.Next() {
				ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
				client.Post(ctx, ep, nil, body)
				cancel()
			}
		})
	})
	for _, destinations := range []int{1, 100} {
		b.Run("engine/"+strconv.Itoa(destinations), func(b *testing.B) {
			store, err := pebblestore.Open(b.TempDir(), pebblestore.Options{Logger: slog.New(slog.DiscardHandler)})
			if err != nil {
				b.Fatal(err)
			}
			b.Cleanup(func() { _ = store.Close() })
			e := run(b, store)
			w := &world{engine: e}
			var all []liveconfig.Destination
			for i := range destinations {
				d := dest(fmt.Sprintf("d%04d", i), receiver.URL)
				d.Signing = liveconfig.SigningSchemes{{Type: liveconfig.HMACSHA1, Secret: liveconfig.NewSecret("s3cr3t")}}
				all = append(all, d)
			}
			if err := e.Apply(w.view(all...)); err != nil {
				b.Fatal(err)
			}
			arrived.Store(0)
			n := max(1, b.N/destinations)
			msgs := make([]queue.Message, n)
			for i := range msgs {
				msgs[i] = queue.Message{Source: "ns/web", ID: strconv.Itoa(i), AcceptedAt: time.Now(), Body: body}
			}
			b.ReportAllocs()
			b.ResetTimer()
			for batch := range slices.Chunk(msgs, 500) {
				if _, err := store.Append(context.Background(), batch); err != nil {
					b.Fatal(err)
				}
			}
			for arrived.Load() < int64(n*destinations) {
				time.Sleep(time.Millisecond)
			}
		})
	}
}
