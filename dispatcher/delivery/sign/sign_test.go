package sign

import (
	"bytes"
	"fmt"
	"log/slog"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/posthorn/posthorn/dispatcher/egress"
	"github.com/posthorn/posthorn/dispatcher/liveconfig"
)

func secret(s string) liveconfig.Secret { return liveconfig.NewSecret(s) }

const body = `{"version":1,"type":"track","userId":"u1","event":"Order Completed","properties":{"name":"Zoë \u2603 ☃"}}`

func TestHeaders(t *testing.T) {
	for _, test := range []struct {
		name    string
		signing liveconfig.Signing
		id      string
		now     int64
		body    string
		want    []egress.Header
	}{
		{
			// RFC 2202, test case 2.
			name: "HMAC-SHA1", signing: liveconfig.Signing{Scheme: liveconfig.HMACSHA1, Secret: secret("Jefe")},
			body: "what do ya want for nothing?",
			want: []egress.Header{{Name: "X-Signature", Value: "effcdf6ae5eb2fa2d27416d5f184df9c259a7c79"}},
		},
		{
			name:    "HMAC-SHA1 in rotation",
			signing: liveconfig.Signing{Scheme: liveconfig.HMACSHA1, Secret: secret("Jefe"), Previous: secret(strings.Repeat("k", 100))},
			body:    "what do ya want for nothing?",
			want: []egress.Header{
				{Name: "X-Signature", Value: "effcdf6ae5eb2fa2d27416d5f184df9c259a7c79"},
				{Name: "X-Signature-Previous", Value: "9f4fc09c7dc6aa761a5bc28a7fbdf6336c25655f"},
			},
		},
		{
			// The example of the Standard Webhooks specification's libraries.
			name:    "Standard Webhooks",
			signing: liveconfig.Signing{Scheme: liveconfig.StandardWebhooks, Secret: secret("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")},
			id:      "msg_p5jXN8AQM9LWM0D4loKWxJek", now: 1614265330, body: `{"test": 2432232314}`,
			want: []egress.Header{
				{Name: "webhook-id", Value: "msg_p5jXN8AQM9LWM0D4loKWxJek"},
				{Name: "webhook-timestamp", Value: "1614265330"},
				{Name: "webhook-signature", Value: "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="},
			},
		},
		{
			name:    "Standard Webhooks in rotation, one secret as it is",
			signing: liveconfig.Signing{Scheme: liveconfig.StandardWebhooks, Secret: secret("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"), Previous: secret("plain")},
			id:      "msg_p5jXN8AQM9LWM0D4loKWxJek", now: 1614265330, body: `{"test": 2432232314}`,
			want: []egress.Header{
				{Name: "webhook-id", Value: "msg_p5jXN8AQM9LWM0D4loKWxJek"},
				{Name: "webhook-timestamp", Value: "1614265330"},
				{Name: "webhook-signature", Value: "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE= v1,tgOMx2V+ymftc5zrV4Kwy5UOWZAx1XMh0yu4Sm/6/r0="},
			},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			s, err := New(test.signing)
			if err != nil {
				t.Fatal(err)
			}
			// Twice, because the second time uses a state that was used before.
			for range 2 {
				if diff := cmp.Diff(test.want, s.Headers(nil, test.id, time.Unix(test.now, 0), []byte(test.body))); diff != "" {
					t.Error(diff)
				}
			}
		})
	}
}

// What a receiver in JavaScript computes, the way the specification says.
func TestNode(t *testing.T) {
	node, err := exec.LookPath("node")
	if err != nil {
		t.Skip("node is not installed")
	}
	run := func(script string) string {
		cmd := exec.Command(node, "-e", script)
		cmd.Stdin = strings.NewReader(body)
		out, err := cmd.Output()
		if err != nil {
			t.Fatal(err)
		}
		return strings.TrimSpace(string(out))
	}
	const read = `const crypto = require('crypto'); const body = require('fs').readFileSync(0); `
	sha1, err := New(liveconfig.Signing{Scheme: liveconfig.HMACSHA1, Secret: secret("zoë's secret")})
	if err != nil {
		t.Fatal(err)
	}
	want := run(read + `console.log(crypto.createHmac('sha1', "zoë's secret").update(body).digest('hex'))`)
	if got := sha1.Headers(nil, "", time.Time{}, []byte(body))[0].Value; got != want {
		t.Errorf("HMACSHA1: %s, Node says %s", got, want)
	}
	standard, err := New(liveconfig.Signing{Scheme: liveconfig.StandardWebhooks, Secret: secret("whsec_c2VjcmV0"), Previous: secret("old")})
	if err != nil {
		t.Fatal(err)
	}
	want = run(read + `const sign = key => 'v1,' + crypto.createHmac('sha256', key).update('id-1.99.').update(body).digest('base64');
		console.log(sign(Buffer.from('c2VjcmV0', 'base64')) + ' ' + sign('old'))`)
	if got := standard.Headers(nil, "id-1", time.Unix(99, 0), []byte(body))[2].Value; got != want {
		t.Errorf("StandardWebhooks: %s, Node says %s", got, want)
	}
}

func TestRefused(t *testing.T) {
	for name, s := range map[string]liveconfig.Signing{
		"no secret":            {Scheme: liveconfig.HMACSHA1},
		"no secret, previous":  {Scheme: liveconfig.HMACSHA1, Previous: secret("s3cr3t")},
		"unknown scheme":       {Scheme: "HMACMD5", Secret: secret("s3cr3t")},
		"no scheme":            {Secret: secret("s3cr3t")},
		"nothing behind whsec": {Scheme: liveconfig.StandardWebhooks, Secret: secret("whsec_")},
		"not base64":           {Scheme: liveconfig.StandardWebhooks, Secret: secret("whsec_s3cr3t!")},
		"previous not base64":  {Scheme: liveconfig.StandardWebhooks, Secret: secret("s3cr3t"), Previous: secret("whsec_s3cr3t!")},
	} {
		signer, err := New(s)
		if err == nil {
			t.Errorf("%s: no error", name)
			continue
		}
		if strings.Contains(err.Error(), "s3cr3t") {
			t.Errorf("%s: the error holds the secret: %v", name, err)
		}
		if h := signer.Headers(nil, "", time.Time{}, nil); h != nil {
			t.Errorf("%s: signs %v", name, h)
		}
	}
}

func TestDoesNotPrint(t *testing.T) {
	s, err := New(liveconfig.Signing{Scheme: liveconfig.HMACSHA1, Secret: secret("s3cr3t"), Previous: secret("s3cr3t")})
	if err != nil {
		t.Fatal(err)
	}
	var log bytes.Buffer
	slog.New(slog.NewJSONHandler(&log, nil)).Info("x", "signer", s)
	for _, text := range []string{fmt.Sprintf("%v %+v %#v %s %x", s, s, s, s, s), log.String()} {
		if strings.Contains(text, "s3cr3t") || strings.Contains(text, "733363723374") {
			t.Error(text)
		}
	}
}

func TestConcurrent(t *testing.T) {
	s, err := New(liveconfig.Signing{Scheme: liveconfig.HMACSHA1, Secret: secret("Jefe")})
	if err != nil {
		t.Fatal(err)
	}
	var group sync.WaitGroup
	for i := range 8 {
		group.Go(func() {
			b := []byte(fmt.Sprint(i))
			want := s.Headers(nil, "", time.Time{}, b)
			for range 1000 {
				if got := s.Headers(nil, "", time.Time{}, b); got[0] != want[0] {
					t.Errorf("%v, want %v", got, want)
					return
				}
			}
		})
	}
	group.Wait()
}

func BenchmarkHeaders(b *testing.B) {
	s, err := New(liveconfig.Signing{Scheme: liveconfig.HMACSHA1, Secret: secret("Jefe")})
	if err != nil {
		b.Fatal(err)
	}
	payload := bytes.Repeat([]byte("x"), 1024)
	headers := make([]egress.Header, 0, 4)
	b.ReportAllocs()
	for b.Loop() {
		headers = s.Headers(headers[:0], "id", time.Time{}, payload)
	}
}
