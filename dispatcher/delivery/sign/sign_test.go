package sign

import (
	"bytes"
	"encoding/base64"
	"fmt"
	"log/slog"
	"os/exec"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/dispatcher/delivery/egress"
	"github.com/posthorn/posthorn/test/need"
)

func secret(s string) liveconfig.Secret { return liveconfig.NewSecret(s) }

const body = `{"version":1,"type":"track","userId":"u1","event":"Order Completed","properties":{"name":"Zoë \u2603 ☃"}}`

// standardExampleKey is the key of the Standard Webhooks specification's example.
var standardExampleKey = func() string {
	raw, _ := base64.StdEncoding.DecodeString("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")
	return string(raw)
}()

func TestHeaders(t *testing.T) {
	for _, test := range []struct {
		name    string
		signing liveconfig.SigningSchemes
		id      string
		now     int64
		body    string
		want    []egress.Header
	}{
		{
			// RFC 2202, test case 2.
			name: "HMAC-SHA1", signing: liveconfig.SigningSchemes{{Type: liveconfig.HMACSHA1, Secret: secret("Jefe")}},
			body: "what do ya want for nothing?",
			want: []egress.Header{{Name: "X-Signature", Value: "effcdf6ae5eb2fa2d27416d5f184df9c259a7c79"}},
		},
		{
			name:    "HMAC-SHA1 in rotation",
			signing: liveconfig.SigningSchemes{{Type: liveconfig.HMACSHA1, Secret: secret("Jefe"), Previous: secret(strings.Repeat("k", 100))}},
			body:    "what do ya want for nothing?",
			want: []egress.Header{
				{Name: "X-Signature", Value: "effcdf6ae5eb2fa2d27416d5f184df9c259a7c79"},
				{Name: "X-Signature-Previous", Value: "9f4fc09c7dc6aa761a5bc28a7fbdf6336c25655f"},
			},
		},
		{
			// The example of the Standard Webhooks specification's libraries.
			name:    "Standard Webhooks",
			signing: liveconfig.SigningSchemes{{Type: liveconfig.StandardWebhooks, Secret: secret("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")}},
			id:      "msg_p5jXN8AQM9LWM0D4loKWxJek", now: 1614265330, body: `{"test": 2432232314}`,
			want: []egress.Header{
				{Name: "webhook-id", Value: "msg_p5jXN8AQM9LWM0D4loKWxJek"},
				{Name: "webhook-timestamp", Value: "1614265330"},
				{Name: "webhook-signature", Value: "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="},
			},
		},
		{
			name: "Standard Webhooks in rotation, one secret as it is",
			signing: liveconfig.SigningSchemes{{Type: liveconfig.StandardWebhooks, Secret: secret("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"),
				Previous: secret("plain")}},
			id: "msg_p5jXN8AQM9LWM0D4loKWxJek", now: 1614265330, body: `{"test": 2432232314}`,
			want: []egress.Header{
				{Name: "webhook-id", Value: "msg_p5jXN8AQM9LWM0D4loKWxJek"},
				{Name: "webhook-timestamp", Value: "1614265330"},
				{Name: "webhook-signature", Value: "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE= v1,tgOMx2V+ymftc5zrV4Kwy5UOWZAx1XMh0yu4Sm/6/r0="},
			},
		},
		{
			// The example of GitHub's documentation.
			name: "HMAC in the format of GitHub",
			signing: liveconfig.SigningSchemes{{Type: liveconfig.HMAC, Secret: secret("It's a Secret to Everybody"), Format: &liveconfig.HMACFormat{
				Header: "X-Hub-Signature-256", Algorithm: liveconfig.SHA256, Encoding: liveconfig.Hex, Content: liveconfig.SignBody, Value: "sha256={signature}",
			}}},
			body: "Hello, World!",
			want: []egress.Header{{Name: "X-Hub-Signature-256", Value: "sha256=757107ea0eb2509fc211221cce984b8a37570b6d7586c22c46f4379c8b043e17"}},
		},
		{
			// The example of the Standard Webhooks specification, in other headers.
			name: "HMAC with the ID and the time in the value",
			signing: liveconfig.SigningSchemes{{Type: liveconfig.HMAC, Secret: secret(standardExampleKey), Format: &liveconfig.HMACFormat{
				Header: "X-A", Algorithm: liveconfig.SHA256, Encoding: liveconfig.Base64, Content: liveconfig.IDTimestampBody, Value: "id={id}; t={timestamp}; s={signature}",
			}}},
			id: "msg_p5jXN8AQM9LWM0D4loKWxJek", now: 1614265330, body: `{"test": 2432232314}`,
			want: []egress.Header{{Name: "X-A", Value: "id=msg_p5jXN8AQM9LWM0D4loKWxJek; t=1614265330; s=g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="}},
		},
		{
			// RFC 2202 and RFC 4231, test cases 2.
			name: "HMAC in rotation, with a header for the previous secret",
			signing: liveconfig.SigningSchemes{{Type: liveconfig.HMAC, Secret: secret("Jefe"), Previous: secret("Jefe"),
				Format: &liveconfig.HMACFormat{
					Header: "X-A", Algorithm: liveconfig.SHA512, Encoding: liveconfig.Hex, Content: liveconfig.SignBody, Value: "{signature}",
				}}},
			body: "what do ya want for nothing?",
			want: []egress.Header{
				{Name: "X-A", Value: "164b7a7bfcf819e2e395fbe73b56e0a387bd64222e831fd610270cd7ea2505549758bf75c05a994a6d034f65f8f0e6fdcaeab1a34d4a6b4b636e070a38bce737"},
				{Name: "X-A-Previous", Value: "164b7a7bfcf819e2e395fbe73b56e0a387bd64222e831fd610270cd7ea2505549758bf75c05a994a6d034f65f8f0e6fdcaeab1a34d4a6b4b636e070a38bce737"},
			},
		},
		{
			// The headers that both schemes need are sent once.
			name: "HMAC beside Standard Webhooks",
			signing: liveconfig.SigningSchemes{
				{Type: liveconfig.HMAC, Secret: secret(standardExampleKey), Previous: secret("plain"), Format: &liveconfig.HMACFormat{
					Header: "X-A", Algorithm: liveconfig.SHA256, Encoding: liveconfig.Base64, Content: liveconfig.IDTimestampBody, Value: "{signature}", PreviousValue: " {signature}",
				}},
				{Type: liveconfig.StandardWebhooks, Secret: secret("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw")},
			},
			id: "msg_p5jXN8AQM9LWM0D4loKWxJek", now: 1614265330, body: `{"test": 2432232314}`,
			want: []egress.Header{
				{Name: "webhook-id", Value: "msg_p5jXN8AQM9LWM0D4loKWxJek"},
				{Name: "webhook-timestamp", Value: "1614265330"},
				{Name: "X-A", Value: "g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE= tgOMx2V+ymftc5zrV4Kwy5UOWZAx1XMh0yu4Sm/6/r0="},
				{Name: "webhook-signature", Value: "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE="},
			},
		},
		{
			// Each scheme signs under its own secrets.
			name: "both schemes, one in rotation",
			signing: liveconfig.SigningSchemes{
				{Type: liveconfig.HMACSHA1, Secret: secret("Jefe")},
				{Type: liveconfig.StandardWebhooks, Secret: secret("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"), Previous: secret("plain")},
			},
			id: "msg_p5jXN8AQM9LWM0D4loKWxJek", now: 1614265330, body: `{"test": 2432232314}`,
			want: []egress.Header{
				{Name: "X-Signature", Value: "8fdc229f67ee3594f85943e066e4ad250e5c66e6"},
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

// A secret or signature in a receiver's response must not be visible in the dead letter.
func TestRedact(t *testing.T) {
	for _, signing := range []liveconfig.SigningSchemes{
		{{Type: liveconfig.HMACSHA1, Secret: secret("current-s3cr3t"), Previous: secret("previous-s3cr3t")}},
		{{Type: liveconfig.StandardWebhooks, Secret: secret("whsec_Y3VycmVudC1zM2NyM3Q="), Previous: secret("whsec_cHJldmlvdXMtczNjcjN0")}},
	} {
		s, err := New(signing)
		if err != nil {
			t.Fatal(err)
		}
		headers := s.Headers([]egress.Header{{Name: "Idempotency-Key", Value: "message-1"}}, "id-1", time.Unix(99, 0), []byte(body))
		answer := "bad: message-1"
		for _, text := range []string{
			"current-s3cr3t", "previous-s3cr3t", "CURRENT-S3CR3T", "Y3VycmVudC1zM2NyM3Q=", "cHJldmlvdXMtczNjcjN0", "63757272656e742d733363723374",
			headers[1].Value, headers[len(headers)-1].Value,
		} {
			answer += " " + text
		}
		if signing[0].Type == liveconfig.StandardWebhooks {
			answer = strings.Replace(answer, " "+headers[1].Value, "", 1) // The webhook-id may be shown.
		}
		got := string(s.Redact([]byte(answer), headers))
		want := "bad: message-1"
		for range strings.Count(answer, " ") - 1 {
			want += " "
			want += "[redacted]"
		}
		got = strings.NewReplacer("v1,", "", "=", "").Replace(got)
		if got != want {
			t.Errorf("%s: got %q, want %q, of %q", signing[0].Type, got, want, answer)
		}
	}
	if got := string((Signer{}).Redact([]byte("as it is"), nil)); got != "as it is" {
		t.Errorf("without signing: %q", got)
	}
}

// The signatures of every format are redacted, a timestamp is not.
func TestRedactFormats(t *testing.T) {
	for _, before := range []string{"", "sha256=", "t={timestamp},v1=", "v1 ", "keyId=a;signature="} {
		for _, encoding := range []string{liveconfig.Hex, liveconfig.Base64} {
			t.Run(encoding+" "+before, func(t *testing.T) {
				s,
					err := New(liveconfig.SigningSchemes{{Type: liveconfig.HMAC, Secret: secret("current-s3cr3t"), Previous: secret("previous-s3cr3t"),
					Format: &liveconfig.HMACFormat{
						Header: "X-A", Algorithm: liveconfig.SHA1, Encoding: encoding, Content: liveconfig.SignBody, Value: before + "{signature}",
					}}})
				if err != nil {
					t.Fatal(err)
				}
				headers := s.Headers(nil, "", time.Unix(1614265330, 0), []byte(body))
				for _, h := range headers {
					signature := strings.TrimPrefix(h.Value, strings.ReplaceAll(before, "{timestamp}", "1614265330"))
					got := string(s.Redact([]byte("at 1614265330: "+signature), headers))
					if want := "at 1614265330: [redacted]"; strings.TrimRight(got, "=") != want {
						t.Errorf("%s: got %q, want %q", h.Name, got, want)
					}
				}
			})
		}
	}
}

// The signature as a receiver in JavaScript computes it from the specification.
func TestNode(t *testing.T) {
	node := need.Program(t, "node")
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
	sha1, err := New(liveconfig.SigningSchemes{{Type: liveconfig.HMACSHA1, Secret: secret("zoë's secret")}})
	if err != nil {
		t.Fatal(err)
	}
	want := run(read + `console.log(crypto.createHmac('sha1', "zoë's secret").update(body).digest('hex'))`)
	if got := sha1.Headers(nil, "", time.Time{}, []byte(body))[0].Value; got != want {
		t.Errorf("HMACSHA1: %s, Node says %s", got, want)
	}
	standard,
		err := New(liveconfig.SigningSchemes{{Type: liveconfig.StandardWebhooks, Secret: secret("whsec_c2VjcmV0"), Previous: secret("old")}})
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
	for name, s := range map[string]liveconfig.SigningSchemes{
		"no secret":           {{Type: liveconfig.HMACSHA1}},
		"no secret, previous": {{Type: liveconfig.HMACSHA1, Previous: secret("s3cr3t")}},
		"unknown scheme":      {{Type: "HMACMD5", Secret: secret("s3cr3t")}},
		"no scheme":           {{Secret: secret("s3cr3t")}},
		"no format":           {{Type: liveconfig.HMAC, Secret: secret("s3cr3t")}},
		"unknown algorithm": {{Type: liveconfig.HMAC, Secret: secret("s3cr3t"),
			Format: &liveconfig.HMACFormat{Header: "X-A", Algorithm: "MD5", Encoding: "Hex", Content: "Body", Value: "{signature}"}}},
		"nothing behind whsec": {{Type: liveconfig.StandardWebhooks, Secret: secret("whsec_")}},
		"not base64":           {{Type: liveconfig.StandardWebhooks, Secret: secret("whsec_s3cr3t!")}},
		"second of two":        {{Type: liveconfig.HMACSHA1, Secret: secret("s3cr3t")}, {Type: liveconfig.StandardWebhooks}},
		"previous not base64":  {{Type: liveconfig.StandardWebhooks, Secret: secret("s3cr3t"), Previous: secret("whsec_s3cr3t!")}},
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
	s, err := New(liveconfig.SigningSchemes{{Type: liveconfig.HMACSHA1, Secret: secret("s3cr3t"), Previous: secret("s3cr3t")}})
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
	s, err := New(liveconfig.SigningSchemes{{Type: liveconfig.HMACSHA1, Secret: secret("Jefe")}})
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

// One scheme costs no more than its signature's text; the second one costs its own.
func TestAllocations(t *testing.T) {
	info, _ := debug.ReadBuildInfo()
	if slices.Contains(info.Settings, debug.BuildSetting{Key: "-race", Value: "true"}) {
		t.Skip("under the race detector sync.Pool drops entries at random")
	}
	one := liveconfig.SigningSchemes{{Type: liveconfig.HMACSHA1, Secret: secret("Jefe")}}
	payload := bytes.Repeat([]byte("x"), 1024)
	headers := make([]egress.Header, 0, 8)
	for _, c := range []struct {
		name    string
		schemes liveconfig.SigningSchemes
		most    float64
	}{
		{"unsigned", nil, 0},
		{"HMACSHA1", one, 1},
		{"HMAC", liveconfig.SigningSchemes{{Type: liveconfig.HMAC, Secret: secret("Jefe"), Format: &liveconfig.HMACFormat{Header: "Stripe-Signature", Algorithm: "SHA256", Encoding: "Hex", Content: "TimestampBody", Value: "t={timestamp},v1={signature}"}}}, 2},
		{"both", append(one, liveconfig.SigningScheme{Type: liveconfig.StandardWebhooks, Secret: secret("b")}), 4},
	} {
		s, err := New(c.schemes)
		if err != nil {
			t.Fatal(err)
		}
		if got := testing.AllocsPerRun(100, func() { headers = s.Headers(headers[:0], "id", time.Unix(1614265330, 0), payload) }); got > c.most {
			t.Errorf("%s: %v allocations for a request, want at most %v", c.name, got, c.most)
		}
	}
}

func BenchmarkHeaders(b *testing.B) {
	for name, scheme := range map[string]liveconfig.SigningScheme{
		"HMACSHA1":         {Type: liveconfig.HMACSHA1},
		"StandardWebhooks": {Type: liveconfig.StandardWebhooks},
		"HMAC SHA256":      {Type: liveconfig.HMAC, Format: &liveconfig.HMACFormat{Header: "Stripe-Signature", Algorithm: liveconfig.SHA256, Encoding: liveconfig.Hex, Content: liveconfig.TimestampBody, Value: "t={timestamp},v1={signature}"}},
	} {
		b.Run(name, func(b *testing.B) {
			scheme.Secret = secret("Jefe")
			s, err := New(liveconfig.SigningSchemes{scheme})
			if err != nil {
				b.Fatal(err)
			}
			payload := bytes.Repeat([]byte("x"), 1024)
			headers := make([]egress.Header, 0, 4)
			b.ReportAllocs()
			for b.Loop() {
				headers = s.Headers(headers[:0], "id", time.Unix(1614265330, 0), payload)
			}
		})
	}
}
