package liveconfig

import (
	"bytes"
	"compress/gzip"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"log/slog"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

const canary = "s3cr3t-canary"

// full returns a config in which every field is set, every secret to the canary.
func full() Config {
	s := NewSecret("https://hooks.example/" + canary)
	return Config{
		Version: FormatVersion, Namespace: "shop",
		Sources: []Source{{Name: "web", Generation: 2, Revision: "r1", Suspended: true,
			WriteKeySHA256: KeyHashes{strings.Repeat("ab", 32), strings.Repeat("cd", 32)}, AllowedOrigins: []string{"*"}, CallsPerSecond: 5,
			Burst: 10}},
		Destinations: []Destination{{
			Name: "crm", Generation: 3, Revision: "r2", State: Active, PausedReason: "x", Sources: []string{"web"}, SourcesUnknown: true,
			Endpoints: []Endpoint{{
				Name: "primary", URL: s, Headers: []Header{{Name: "Authorization", Value: NewSecret(canary)}},
				TLS:  &TLS{CA: "ca", ClientCert: "cert", ClientKey: NewSecret(canary)},
				GZip: true,
				OAuth2: &OAuth2{
					TokenURL: "https://login.example", ClientID: "posthorn", ClientSecret: NewSecret(canary), SecretInBody: true, Scopes: []string{"a"},
					Parameters: map[string]string{"audience": "b"}, TLS: &TLS{CA: "ca", ClientCert: "cert", ClientKey: NewSecret(canary)},
				},
			}},
			Signing: SigningSchemes{{Name: "a", Type: HMAC, Secret: NewSecret(canary), Previous: NewSecret(canary),
				Format: &HMACFormat{"X-A", SHA256, Hex, SignBody, "{signature}", ",{signature}"}},
				{Name: "standard", Type: StandardWebhooks, Secret: NewSecret(canary)}},
			Success: AnyEndpoint,
			Delivery: Delivery{TimeoutMS: 5000, RetryWindowMS: 1000, MinBackoffMS: 1, MaxBackoffMS: 2, MaxInFlight: 3, RequestsPerSecond: 4,
				RetryStatusCodes: []int{409}},
			ExactNumbers: true, IgnoreDeletions: true,
			SuccessRule: &SuccessRule{Expression: "true", DeadLetter: true},
			Filter:      &Filter{Types: []string{"track"}, Events: []string{"*"}, Expression: "true", Invalid: true},
			Request: &Request{Body: "call", ContentType: ContentForm, Method: "PUT", Path: "['a']", Query: "{}",
				Headers: []RequestHeader{{Name: "X-B", Expression: "'b'"}}},
			Batch:       &Batch{MaxMessages: 100, MaxBytes: 1 << 20, MaxDelayMS: 1000, Format: BatchNDJSON, PerItem: true},
			DeadLetters: DeadLetters{RetentionMS: 1, MaxBytes: 2, ForwardTo: "ops"},
			Redact: &Redact{Allow: []string{"userId"}, Drop: []string{"a"}, Mask: []string{"b"},
				Hash: &RedactHash{Key: NewSecret(canary), Paths: []HashedPath{{Path: "userId", Email: true}}}},
		}},
		Audiences: []Audience{{Name: "shoppers", Generation: 1, Revision: "r3", Source: "web", Key: "shoppers", Kind: KindAudience,
			MaxRemovalPercent: 50}},
		Deletions: []Deletion{{Name: "u1", Generation: 1, Revision: "r4", ID: "ab12", UserID: "u1", UID: "1", Ended: true, DeadlineSeconds: 60,
			Sources: []string{"web"}, Suppress: true}},
		Redeliveries: []Redelivery{{
			Name: "again", Generation: 1, Revision: "r5", ID: "cd34", UID: "2", Destination: "crm", Phase: RedeliveryRun, DryRun: true, Rate: 2.5,
			Reasons: []string{"Expired"}, StatusCodes: []int{422}, Types: []string{"track"}, Events: []string{"E"}, Since: time.Unix(1, 0).UTC(),
			Until: time.Unix(2, 0).UTC(),
		}},
	}
}

func TestEncodeDecodeKeepsEverything(t *testing.T) {
	want := full()
	if path := zeroField(reflect.ValueOf(want), "Config"); path != "" {
		t.Fatalf("the fixture must set every field; %s is zero", path)
	}
	data, revision, err := Encode(want)
	if err != nil {
		t.Fatal(err)
	}
	got, gotRevision, err := Decode(data)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("decode(encode(c)) differs (-want +got):\n%s", diff)
	}
	if revision != gotRevision {
		t.Errorf("revision of the decoded config: got %s, want %s", gotRevision, revision)
	}
	again, _, _ := Encode(full())
	if !bytes.Equal(data, again) {
		t.Error("equal configs gave different bytes")
	}
}

func TestBinarySecretsSurvive(t *testing.T) {
	want := full()
	secret := string([]byte{0xff, 0x00, 0xfe, '"', 0x80})
	want.Destinations[0].Signing[0].Secret = NewSecret(secret)
	data, _, err := Encode(want)
	if err != nil {
		t.Fatal(err)
	}
	got, _, err := Decode(data)
	if err != nil {
		t.Fatal(err)
	}
	if got.Destinations[0].Signing[0].Secret.Reveal() != secret {
		t.Error("a secret that is not UTF-8 differs after encoding and decoding")
	}
}

func zeroField(v reflect.Value, path string) string {
	switch v.Kind() {
	case reflect.Struct:
		if v.Type() == reflect.TypeFor[Secret]() || v.Type() == reflect.TypeFor[time.Time]() {
			break
		}
		for i := range v.NumField() {
			if p := zeroField(v.Field(i), path+"."+v.Type().Field(i).Name); p != "" {
				return p
			}
		}
		return ""
	case reflect.Pointer:
		if !v.IsNil() {
			return zeroField(v.Elem(), path)
		}
	case reflect.Slice:
		if v.Len() > 0 {
			return zeroField(v.Index(0), path+"[0]")
		}
	}
	if v.IsZero() {
		return path
	}
	return ""
}

func TestSecretsDoNotPrint(t *testing.T) {
	c := full()
	var log bytes.Buffer
	slog.New(slog.NewJSONHandler(&log, nil)).Info("x", "config", c, "secret", c.Destinations[0].Signing[0].Secret)
	slog.New(slog.NewTextHandler(&log, nil)).Info("x", "config", c, "secret", c.Destinations[0].Signing[0].Secret)
	for _, verb := range []string{"%v", "%+v", "%#v", "%s", "%q", "%x", "%d"} {
		fmt.Fprintf(&log, verb+"\n", c)
		fmt.Fprintf(&log, verb+"\n", c.Destinations[0].Signing[0].Secret)
		fmt.Fprintf(&log, verb+"\n", &c.Destinations[0].Signing[0].Secret)
	}
	plain, err := json.Marshal(c)
	if err != nil {
		t.Fatal(err)
	}
	log.Write(plain)
	if strings.Contains(log.String(), canary) || strings.Contains(log.String(), fmt.Sprintf("%x", canary)) {
		t.Errorf("a secret was printed:\n%s", log.String())
	}
	if !strings.Contains(log.String(), redacted) {
		t.Errorf("the log does not contain %q", redacted)
	}
	if c.Destinations[0].Signing[0].Secret.Reveal() != canary {
		t.Error("Reveal does not return the text")
	}
}

func TestDecodeIsStrict(t *testing.T) {
	for name, tc := range map[string]struct {
		change func(*Config)
		want   string
	}{
		"namespace":      {func(c *Config) { c.Namespace = "" }, "the namespace is empty"},
		"version":        {func(c *Config) { c.Version = 99 }, "format version 99"},
		"source twice":   {func(c *Config) { c.Sources = append(c.Sources, c.Sources[0]) }, `source "web"`},
		"key":            {func(c *Config) { c.Sources[0].WriteKeySHA256[1] = "zz" }, "writeKeySHA256"},
		"state":          {func(c *Config) { c.Destinations[0].State = "?" }, "state"},
		"success":        {func(c *Config) { c.Destinations[0].Success = "?" }, "success"},
		"source missing": {func(c *Config) { c.Destinations[0].Sources = []string{"ios"} }, `source "ios" does not exist`},
		"no endpoint":    {func(c *Config) { c.Destinations[0].Endpoints = nil }, "0 endpoints"},
		"six endpoints": {func(c *Config) {
			for n := range 5 {
				c.Destinations[0].Endpoints = append(c.Destinations[0].Endpoints,
					Endpoint{Name: string(rune('a' + n)), URL: NewSecret("https://hooks.example")})
			}
		}, "6 endpoints"},
		"url":          {func(c *Config) { c.Destinations[0].Endpoints[0].URL = NewSecret("ftp://" + canary) }, `endpoint "primary": url`},
		"empty secret": {func(c *Config) { c.Destinations[0].Signing[0].Secret = Secret{} }, "secret is empty"},
		"scheme":       {func(c *Config) { c.Destinations[0].Signing[0].Type = "MD5" }, "signing scheme"},
		"no format":    {func(c *Config) { c.Destinations[0].Signing[0].Format = nil }, "has no format"},
		"format":       {func(c *Config) { c.Destinations[0].Signing[0].Format.Algorithm = "MD5" }, "algorithm"},
		"scheme twice": {func(c *Config) {
			c.Destinations[0].Signing = append(c.Destinations[0].Signing, c.Destinations[0].Signing[1])
		}, "signing scheme \"standard\" writes the header of another scheme"},
		"header twice": {func(c *Config) {
			other := c.Destinations[0].Signing[0]
			other.Name, other.Format = "b", &HMACFormat{"x-a", SHA256, Hex, SignBody, "{signature}", ""}
			c.Destinations[0].Signing = append(c.Destinations[0].Signing, other)
		}, "signing scheme \"b\" writes the header of another scheme"},
		"second secret": {func(c *Config) { c.Destinations[0].Signing[1].Secret = Secret{} }, "standard\": secret is empty"},
		"timeout":       {func(c *Config) { c.Destinations[0].Delivery.TimeoutMS = 60_001 }, "timeoutMS"},
		"window":        {func(c *Config) { c.Destinations[0].Delivery.RetryWindowMS = 30*24*3600*1000 + 1 }, "retryWindowMS"},
		"in flight":     {func(c *Config) { c.Destinations[0].Delivery.MaxInFlight = 0 }, "maxInFlight"},
		"status code":   {func(c *Config) { c.Destinations[0].Delivery.RetryStatusCodes = []int{500} }, "retryStatusCodes"},
		"backoff":       {func(c *Config) { c.Destinations[0].Delivery.MinBackoffMS = 3 }, "backoff"},
		"one message":   {func(c *Config) { c.Destinations[0].Batch.MaxMessages = 1 }, "batch: maxMessages must be between 2 and 4000"},
		"messages":      {func(c *Config) { c.Destinations[0].Batch.MaxMessages = 4001 }, "batch: maxMessages must be between 2 and 4000"},
		"bytes":         {func(c *Config) { c.Destinations[0].Batch.MaxBytes = 4<<20 + 1 }, "batch: maxBytes must be between 1024 and 4194304"},
		"delay":         {func(c *Config) { c.Destinations[0].Batch.MaxDelayMS = 60_001 }, "batch: maxDelayMS must be between 0 and 1m0s"},
		"batch format":  {func(c *Config) { c.Destinations[0].Batch.Format = "CSV" }, `batch: format "CSV" is unknown`},
	} {
		t.Run(name, func(t *testing.T) {
			c := full()
			tc.change(&c)
			data, _, err := Encode(c)
			if err != nil {
				t.Fatal(err)
			}
			_, _, err = Decode(data)
			if err == nil || !strings.Contains(err.Error(), tc.want) {
				t.Fatalf("Decode: got error %v, want one with %q", err, tc.want)
			}
			if strings.Contains(err.Error(), canary) {
				t.Errorf("the error contains a secret: %v", err)
			}
		})
	}
	data, _, _ := Encode(full())
	for name, bad := range map[string][]byte{"empty": nil, "not gzip": []byte("{}"), "truncated": data[:len(data)/2]} {
		if _, _, err := Decode(bad); err == nil {
			t.Errorf("Decode of data that is %s: got no error, want one", name)
		}
	}
}

// A namespace that declares a Source with another namespace's write key must not
// get its calls, in any order of the configs.
func TestAWriteKeyHasOneNamespace(t *testing.T) {
	namespace := func(name string) Revisioned {
		return Revisioned{Config: Config{Namespace: name,
			Sources: []Source{{Name: "web", WriteKeySHA256: KeyHashes{hex.EncodeToString(hashOf("key"))}}}}}
	}
	for _, configs := range [][]Revisioned{{namespace("a"), namespace("b")}, {namespace("b"), namespace("a")}} {
		if ref, ok := NewView(configs).SourceByWriteKey("key"); !ok || ref.Namespace != "a" {
			t.Errorf("namespace of the key: got %q (%v), want a", ref.Namespace, ok)
		}
	}
	if ref, ok := NewView([]Revisioned{namespace("a")}).SourceByWriteKey("Key"); ok {
		t.Errorf("Source of an unknown key: got %v, want none", ref)
	}
}

// Both write keys of a rotation belong to the Source.
func TestSourceByEitherWriteKey(t *testing.T) {
	view := NewView([]Revisioned{{Config: Config{Namespace: "a",
		Sources: []Source{{Name: "web", WriteKeySHA256: KeyHashes{hex.EncodeToString(hashOf("old")), hex.EncodeToString(hashOf("new"))}}}}}})
	for _, key := range []string{"old", "new"} {
		if ref, ok := view.SourceByWriteKey(key); !ok || ref.Key() != "a/web" {
			t.Errorf("Source of key %q: got %v (%v), want a/web", key, ref.Key(), ok)
		}
	}
}

func hashOf(key string) []byte {
	sum := sha256.Sum256([]byte(key))
	return sum[:]
}

func TestSecretName(t *testing.T) {
	for _, namespace := range []string{"a", "complete", "a-b", "posthorn-live-complete"} {
		name := SecretName(namespace)
		if got, ok := NamespaceOf(name); !ok || got != namespace {
			t.Errorf("NamespaceOf(%q) = %q, %v; want %q", name, got, ok, namespace)
		}
		if name == MarkerName {
			t.Errorf("SecretName(%q) is the name of the marker", namespace)
		}
	}
	for _, name := range []string{MarkerName, "posthorn-live-00000000-a", "crm", "posthorn-live-"} {
		if namespace, ok := NamespaceOf(name); ok {
			t.Errorf("NamespaceOf(%q) = %q, true; want false", name, namespace)
		}
	}
}

func TestSuppressed(t *testing.T) {
	view := NewView([]Revisioned{
		{Config: Config{Namespace: "a", Deletions: []Deletion{
			{Name: "1", ID: "01", UserID: "everywhere", Suppress: true},
			{Name: "2", ID: "02", UserID: "everywhere", Suppress: true, Sources: []string{"web"}},
			{Name: "3", ID: "03", UserID: "some", Suppress: true, Sources: []string{"web"}},
			{Name: "4", ID: "04", UserID: "some", Suppress: true, Sources: []string{"ios"}},
			{Name: "5", ID: "05", UserID: "notified"},
			{Name: "6", UserID: "not-accepted", Suppress: true},
		}}},
	})
	for _, c := range []struct {
		namespace, source, user string
		want                    bool
	}{
		{"a", "web", "everywhere", true}, {"a", "tv", "everywhere", true}, {"b", "web", "everywhere", false},
		{"a", "web", "some", true}, {"a", "ios", "some", true}, {"a", "tv", "some", false},
		{"a", "web", "notified", false}, {"a", "web", "not-accepted", false}, {"a", "web", "", false},
	} {
		if got := view.Suppressed(SourceRef{Namespace: c.namespace, Source: Source{Name: c.source}}, c.user); got != c.want {
			t.Errorf("Suppressed(%s/%s, %q): got %v, want %v", c.namespace, c.source, c.user, got, c.want)
		}
	}
}

// FuzzDecode checks that decoding, encoding and decoding again gives the same config, and
// that no input causes a panic.
func FuzzDecode(f *testing.F) {
	plain, err := json.Marshal(revealed(full()))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(plain)
	f.Add([]byte(`{"version":1,"namespace":"a","sources":[{"name":"web"}],"destinations":[{"name":"d","state":"Paused","success":"AnyEndpoint","delivery":{"retryWindowMS":1},"signing":{"secret":{"base64":"/w=="}}}]}`))
	f.Fuzz(func(t *testing.T, plain []byte) {
		var packed bytes.Buffer
		zip := gzip.NewWriter(&packed)
		_, _ = zip.Write(plain)
		_ = zip.Close()
		config, _, err := Decode(packed.Bytes())
		if err != nil {
			return
		}
		NewView([]Revisioned{{Config: config}})
		data, revision, err := Encode(config)
		if err != nil {
			t.Fatal(err)
		}
		again, same, err := Decode(data)
		if err != nil || same != revision || !cmp.Equal(config, again, cmpopts.EquateEmpty()) {
			t.Fatalf("decode of the encoded config: got error %v and revision %s, want revision %s (-want +got):\n%s", err, same, revision, cmp.Diff(config, again))
		}
	})
}

func TestDiffering(t *testing.T) {
	configs := []Revisioned{{Config: Config{Namespace: "a"}, Revision: "a1"}, {Config: Config{Namespace: "b"}, Revision: "b1"}}
	since := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	parked := func(namespace string) map[string]map[Ref]bool {
		return map[string]map[Ref]bool{namespace: {{SectionSources, "web"}: true}}
	}
	lost := func(source string) map[string]map[string]Lost {
		return map[string]map[string]Lost{"a": {"crm": {Sources: []string{source}, Since: since}}}
	}
	base := NewView(configs)
	for _, c := range []struct {
		name         string
		before, next *View
		want         []string
	}{
		{"the same", base, NewView(configs), nil},
		{"a higher number of the same config", base, NewView([]Revisioned{configs[0], {Config: configs[1].Config, Revision: "b1", Head: Head{Number: 7}}}), nil},
		{"another revision", base, NewView([]Revisioned{configs[0], {Config: configs[1].Config, Revision: "b2"}}), []string{"b"}},
		{"a new namespace", base, NewView(append(slices.Clone(configs), Revisioned{Config: Config{Namespace: "c"}})), []string{"c"}},
		{"a removed namespace", base, NewView(configs[:1]), []string{"b"}},
		{"a lost namespace", base, NewView(configs[:1], "b"), []string{"b"}},
		{"a namespace without a config fails", base, NewView(configs, "c"), []string{"c"}},
		{"a parked object", base, base.WithParked(parked("b")), []string{"b"}},
		{"the same parked object", base.WithParked(parked("b")), base.WithParked(parked("b")), nil},
		{"a restored object of a removed namespace", base.WithParked(parked("c")), base, []string{"c"}},
		{"a lost connection", base, base.WithLost(lost("web")), []string{"a"}},
		{"another lost connection", base.WithLost(lost("ios")), base.WithLost(lost("web")), []string{"a"}},
		{"the same lost connection", base.WithLost(lost("web")), base.WithLost(lost("web")), nil},
	} {
		t.Run(c.name, func(t *testing.T) {
			if diff := cmp.Diff(c.want, slices.Sorted(slices.Values(c.next.Differing(c.before)))); diff != "" {
				t.Errorf("namespaces (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(c.want, slices.Sorted(slices.Values(c.before.Differing(c.next)))); diff != "" {
				t.Errorf("in the other direction (-want +got):\n%s", diff)
			}
		})
	}
}
