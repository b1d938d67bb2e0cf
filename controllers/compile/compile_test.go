package compile

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/liveconfig"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// The secrets of the golden files contain this word; no output may contain it.
const canary = "canary"

// options is a document in the input of a case with the parts of a Snapshot that are not objects.
type options struct {
	// DenyHosts are the hosts that CheckHost denies.
	DenyHosts []string `json:"denyHosts"`
	// MaxTimeout and MaxRetryWindow are the ceilings.
	MaxTimeout     metav1.Duration `json:"maxTimeout"`
	MaxRetryWindow metav1.Duration `json:"maxRetryWindow"`
	// ForeignWriteKeys has keys, not their hashes.
	ForeignWriteKeys map[string]KeyUse `json:"foreignWriteKeys"`
}

// withFiles replaces each line @FILE of the values by the file.
func withFiles(t *testing.T, values map[string]string) map[string][]byte {
	t.Helper()
	data := map[string][]byte{}
	for key, value := range values {
		data[key] = regexp.MustCompile(`(?m)^@.*$`).ReplaceAllFunc([]byte(value), func(line []byte) []byte {
			pem, err := os.ReadFile(filepath.Join("testdata", string(line[1:])))
			if err != nil {
				t.Fatal(err)
			}
			return pem
		})
	}
	return data
}

func load(t *testing.T, path string) Snapshot {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	s := Snapshot{Namespace: "shop", Secrets: map[string]Secret{}}
	for doc := range strings.SplitSeq(string(text), "\n---\n") {
		var kind metav1.TypeMeta
		parse(t, doc, &kind, false)
		switch kind.Kind {
		case "Source":
			s.Objects = append(s.Objects, pointers(parse(t, doc, &v1beta1.Source{}, true))...)
		case "WebhookDestination":
			s.Objects = append(s.Objects, pointers(parse(t, doc, &v1beta1.WebhookDestination{}, true))...)
		case "Secret":
			secret := parse(t, doc, &corev1.Secret{}, true)
			s.Secrets[secret.Name] = Secret{Version: secret.ResourceVersion, Data: withFiles(t, secret.StringData)}
		case "ConfigMap":
			configMap := parse(t, doc, &corev1.ConfigMap{}, true)
			s.Secrets[ConfigMapName(configMap.Name)] = Secret{Version: configMap.ResourceVersion, Data: withFiles(t, configMap.Data)}
		case "Options":
			o := parse(t, doc, &struct {
				Kind string `json:"kind"`
				options
			}{}, true)
			s.MaxTimeout, s.MaxRetryWindow = o.MaxTimeout.Duration, o.MaxRetryWindow.Duration
			s.CheckHost = func(host string) error {
				if slices.Contains(o.DenyHosts, host) {
					return fmt.Errorf("%s is not a public address", host)
				}
				return nil
			}
			s.ForeignWriteKeys = map[string]KeyUse{}
			for key, use := range o.ForeignWriteKeys {
				sum := sha256.Sum256([]byte(key))
				s.ForeignWriteKeys[hex.EncodeToString(sum[:])] = use
			}
		default:
			t.Fatalf("%s: kind %q", path, kind.Kind)
		}
	}
	return s
}

func parse[T any](t *testing.T, doc string, into *T, strict bool) T {
	t.Helper()
	unmarshal := yaml.UnmarshalStrict
	if !strict {
		unmarshal = func(b []byte, v any, _ ...yaml.JSONOpt) error { return yaml.Unmarshal(b, v) }
	}
	if err := unmarshal([]byte(doc), into); err != nil {
		t.Fatalf("%v in:\n%s", err, doc)
	}
	return *into
}

func cases(t *testing.T) map[string]Snapshot {
	t.Helper()
	paths, err := filepath.Glob("testdata/*.in.yaml")
	if err != nil || len(paths) < 20 {
		t.Fatalf("%d cases (%v)", len(paths), err)
	}
	snapshots := map[string]Snapshot{}
	for _, path := range paths {
		snapshots[strings.TrimSuffix(filepath.Base(path), ".in.yaml")] = load(t, path)
	}
	return snapshots
}

// A golden file contains the redacted config and the verdicts.
func TestGolden(t *testing.T) {
	for name, snapshot := range cases(t) {
		t.Run(name, func(t *testing.T) {
			config, verdicts := table.Compile(snapshot)
			got, err := yaml.Marshal(struct {
				Config   liveconfig.Config `json:"config"`
				Verdicts Verdicts          `json:"verdicts"`
			}{config, verdicts})
			if err != nil {
				t.Fatal(err)
			}
			golden := filepath.Join("testdata", name+".out.yaml")
			if *update {
				if err := os.WriteFile(golden, got, 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), string(got)); diff != "" {
				t.Errorf("%s differs (-want +got); run with -update and review the difference:\n%s", golden, diff)
			}
			if strings.Contains(string(got), canary) {
				t.Error("the output contains a secret")
			}

			// The dispatcher decodes every config without a change.
			data, _, err := liveconfig.Encode(config)
			if err != nil {
				t.Fatal(err)
			}
			decoded, _, err := liveconfig.Decode(data)
			if err != nil {
				t.Fatalf("the dispatcher rejects the config: %v", err)
			}
			if diff := cmp.Diff(config, decoded); diff != "" {
				t.Errorf("decoded config differs:\n%s", diff)
			}
			if len(config.Sources) != len(sourcesOf(&snapshot)) || len(config.Destinations) != len(destinationsOf(&snapshot)) {
				t.Error("an object is missing in the config")
			}
		})
	}
}

func TestSecretsAreResolved(t *testing.T) {
	config, _ := table.Compile(load(t, "testdata/full.in.yaml"))
	d := config.Destinations[0]
	sum := sha256.Sum256([]byte("canary-write-key"))
	for what, pair := range map[string][2]string{
		"write key":   {config.Sources[0].WriteKeySHA256[0], hex.EncodeToString(sum[:])},
		"header":      {d.Endpoints[0].Headers[1].Value.Reveal(), "Bearer canary-token"},
		"literal url": {d.Endpoints[0].URL.Reveal(), "https://hooks.example/in?x=1"},
		"secret url":  {d.Endpoints[1].URL.Reveal(), "https://hooks.example/canary-path"},
		"signing":     {d.Signing[0].Secret.Reveal(), "canary-shared"},
		"previous":    {d.Signing[0].Previous.Reveal(), "Bearer canary-token"},
	} {
		if pair[0] != pair[1] {
			t.Errorf("%s: got %q, want %q", what, pair[0], pair[1])
		}
	}
	if !strings.HasPrefix(d.Endpoints[0].TLS.ClientKey.Reveal(), "-----BEGIN PRIVATE KEY") {
		t.Error("client key is missing")
	}
}

func TestSharedSecretIsTakenByteForByte(t *testing.T) {
	for _, secret := range []string{" spaces ", "\xff\x00\xfe", "\xff\n", "ü"} {
		s := load(t, "testdata/full.in.yaml")
		destinationsOf(&s)[0].Spec.Signing.Schemes[0].Type = v1beta1.HMACSHA1
		s.Secrets["crm"].Data["sharedSecret"] = []byte(secret)
		config, _ := table.Compile(s)
		data, _, err := liveconfig.Encode(config)
		if err != nil {
			t.Fatal(err)
		}
		decoded, _, err := liveconfig.Decode(data)
		if err != nil {
			t.Fatal(err)
		}
		if got := decoded.Destinations[0].Signing[0].Secret.Reveal(); got != secret {
			t.Errorf("got %q, want %q", got, secret)
		}
	}
}

func TestOrderDoesNotMatterAndInputIsNotChanged(t *testing.T) {
	for name, snapshot := range cases(t) {
		wantConfig, wantVerdicts := table.Compile(snapshot)
		before := clone(snapshot)
		for range 20 {
			shuffled := clone(snapshot)
			rand.Shuffle(len(shuffled.Objects), func(i, j int) {
				shuffled.Objects[i], shuffled.Objects[j] = shuffled.Objects[j], shuffled.Objects[i]
			})
			config, verdicts := table.Compile(shuffled)
			if diff := cmp.Diff(wantConfig, config) + cmp.Diff(wantVerdicts, verdicts); diff != "" {
				t.Fatalf("%s: another order returns another result:\n%s", name, diff)
			}
		}
		if diff := cmp.Diff(before.Objects, snapshot.Objects) + cmp.Diff(before.Secrets, snapshot.Secrets); diff != "" {
			t.Errorf("%s: Compile changed its input:\n%s", name, diff)
		}
	}
}

// No destination of any case changes the result for a healthy destination in the same
// namespace, and the config decodes.
func TestOneBadObjectHarmsNoOther(t *testing.T) {
	healthy := load(t, "testdata/simple.in.yaml")
	want, wantVerdicts := table.Compile(healthy)
	tried := 0
	for name, other := range cases(t) {
		for i, bad := range destinationsOf(&other) {
			tried++
			s := clone(healthy)
			bad.Name = fmt.Sprintf("bad-%d", i)
			s.Objects = append(s.Objects, bad)
			for key, secret := range other.Secrets {
				if _, ok := s.Secrets[key]; !ok {
					s.Secrets[key] = secret
				}
			}
			config, verdicts := table.Compile(s)
			if diff := cmp.Diff(want.Destinations[0], config.Destinations[slices.IndexFunc(config.Destinations, func(d liveconfig.Destination) bool {
				return d.Name == "crm"
			})]); diff != "" {
				t.Errorf("%s: the healthy destination's config changed:\n%s", name, diff)
			}
			if diff := cmp.Diff(wantVerdicts["destinations"]["crm"], verdicts["destinations"]["crm"]); diff != "" {
				t.Errorf("%s: the healthy destination's verdict changed:\n%s", name, diff)
			}
			if diff := cmp.Diff(want.Sources, config.Sources); diff != "" {
				t.Errorf("%s: the Source changed:\n%s", name, diff)
			}
			if data, _, err := liveconfig.Encode(config); err != nil {
				t.Error(err)
			} else if _, _, err := liveconfig.Decode(data); err != nil {
				t.Errorf("%s: the dispatcher rejects the config: %v", name, err)
			}
		}
	}
	if tried < 20 {
		t.Fatalf("only %d destinations were tested", tried)
	}
}

func TestRevision(t *testing.T) {
	revisions := func(change func(*Snapshot)) (source, destination string) {
		s := load(t, "testdata/full.in.yaml")
		change(&s)
		config, verdicts := table.Compile(s)
		if config.Destinations[0].Revision != verdicts["destinations"]["crm"].Revision ||
			config.Sources[0].Revision != verdicts["sources"]["web"].Revision {
			t.Error("verdict and config have different revisions")
		}
		return config.Sources[0].Revision, config.Destinations[0].Revision
	}
	wantSource, wantDestination := revisions(func(*Snapshot) {})
	for _, tc := range []struct {
		name                string
		change              func(*Snapshot)
		source, destination bool // whether the revision must change
	}{
		{"generation alone", func(s *Snapshot) { sourcesOf(s)[0].Generation++; destinationsOf(s)[0].Generation++ }, false, false},
		{"a default spelled out", func(s *Snapshot) { no := false; sourcesOf(s)[0].Spec.Suspend = &no }, false, false},
		{"content without version", func(s *Snapshot) { s.Secrets["crm"].Data["sharedSecret"] = []byte("other") }, false, false},
		{"version of a used Secret", func(s *Snapshot) { s.Secrets["crm"] = Secret{Version: "x", Data: s.Secrets["crm"].Data} }, false, true},
		{"version of the write key's Secret", func(s *Snapshot) { s.Secrets["web-key"] = Secret{Version: "x", Data: s.Secrets["web-key"].Data} },
			true, false},
		{"an unused Secret", func(s *Snapshot) { s.Secrets["unused"] = Secret{Version: "1"} }, false, false},
		{"a literal URL", func(s *Snapshot) { destinationsOf(s)[0].Spec.Endpoints[0].URL += "x" }, false, true},
		{"a literal header", func(s *Snapshot) { v := "test"; destinationsOf(s)[0].Spec.Endpoints[0].Headers[0].Value = &v }, false, true},
		{"a timeout", func(s *Snapshot) { destinationsOf(s)[0].Spec.Delivery.Timeout = nil }, false, true},
		{"suspended", func(s *Snapshot) { yes := true; destinationsOf(s)[0].Spec.Suspend = &yes }, false, true},
		{"a Source more", func(s *Snapshot) {
			more := sourcesOf(s)[0].DeepCopy()
			more.Name = "zzz"
			s.Objects = append(s.Objects, more)
		}, false, true},
		{"origins", func(s *Snapshot) { sourcesOf(s)[0].Spec.AllowedOrigins = []string{"*"} }, true, false},
	} {
		source, destination := revisions(tc.change)
		if (source != wantSource) != tc.source || (destination != wantDestination) != tc.destination {
			t.Errorf("%s: source's revision changed %v, destination's %v", tc.name, source != wantSource, destination != wantDestination)
		}
	}
}

func TestSecretRefs(t *testing.T) {
	s := load(t, "testdata/full.in.yaml")
	got := table.SecretRefs(s.Objects...)
	if diff := cmp.Diff(slices.Sorted(maps.Keys(s.Secrets)), got); diff != "" {
		t.Error(diff)
	}
	// Compile uses no Secrets other than those that SecretRefs returns.
	for name, s := range cases(t) {
		refs := table.SecretRefs(s.Objects...)
		want, _ := table.Compile(s)
		s.Secrets = maps.Clone(s.Secrets)
		maps.DeleteFunc(s.Secrets, func(name string, _ Secret) bool { return !slices.Contains(refs, name) })
		if got, _ := table.Compile(s); cmp.Diff(want, got) != "" {
			t.Errorf("%s: SecretRefs does not return every used Secret", name)
		}
	}
}

func TestWriteKeySHA256(t *testing.T) {
	s := load(t, "testdata/simple.in.yaml")
	config, _ := table.Compile(s)
	if hashes := WriteKeySHA256(sourcesOf(&s)[0], s.Secrets); len(hashes) != 1 || !slices.Equal(hashes, config.Sources[0].WriteKeySHA256) {
		t.Errorf("got %q, want %q", hashes, config.Sources[0].WriteKeySHA256)
	}
	if hashes := WriteKeySHA256(sourcesOf(&s)[0], nil); len(hashes) > 0 {
		t.Errorf("a missing Secret has the hashes %q", hashes)
	}
}

func TestTooLarge(t *testing.T) {
	last, _ := table.Compile(load(t, "testdata/one-bad-of-many.in.yaml"))
	s := load(t, "testdata/one-bad-of-many.in.yaml")
	for _, d := range destinationsOf(&s) {
		if d.Name != "any" {
			d.Spec.Endpoints[0].URL += "/changed"
		}
	}
	_, verdicts := table.Compile(s)
	got := table.tooLarge(verdicts, 2<<20, DefaultLimit, last)
	for name, want := range map[string]string{"any": v1beta1.ReasonAccepted, "every": v1beta1.ReasonConfigTooLarge,
		"bad": v1beta1.ReasonInvalidURL} {
		v := got["destinations"][name]
		if v.Reason != want || v.Accepted != (want == v1beta1.ReasonAccepted) {
			t.Errorf("%s: %+v, want reason %s", name, v, want)
		}
		if strings.Contains(v.Message, "2097152 bytes") != (name != "any") {
			t.Errorf("%s: message %q", name, v.Message)
		}
	}
	if !got["sources"]["web"].Accepted {
		t.Errorf("an unchanged Source was refused: %+v", got["sources"]["web"])
	}
	if !verdicts["destinations"]["every"].Accepted {
		t.Error("TooLarge changed its receiver")
	}
}

func TestMessagesAreBounded(t *testing.T) {
	var p problems
	for range 1000 {
		p.add(v1beta1.ReasonNoSource, "spec", "ääääääääääääääääää")
	}
	if _, message := p.verdict(); len(message) > maxMessageBytes || !strings.HasSuffix(message, "…") ||
		strings.ContainsRune(message, '\uFFFD') {
		t.Errorf("%d bytes: …%q", len(message), message[len(message)-20:])
	}
}

func FuzzCompileIsTotal(f *testing.F) {
	f.Add([]byte("https://hooks.example/in"), "name", "X-A", int64(5), "call.x == 1")
	f.Add([]byte("\xff\n"), "", "\x00", int64(-5), "(")
	f.Fuzz(func(t *testing.T, secret []byte, name, header string, number int64, expression string) {
		ref := v1beta1.SecretKeyReference{Name: "s", Key: "k"}
		from := &v1beta1.ValueFromSecret{SecretKeyRef: ref}
		s := Snapshot{
			Namespace: "shop", Policy: Policy{CheckHost: func(string) error { return errors.New("denied") }},
			Secrets: map[string]Secret{"s": {Version: "1", Data: map[string][]byte{"k": secret, corev1.TLSCertKey: secret,
				corev1.TLSPrivateKeyKey: secret}}},
			Objects: []Object{&v1beta1.Source{ObjectMeta: metav1.ObjectMeta{Name: "a"}, Spec: v1beta1.SourceSpec{WriteKeys: []v1beta1.WriteKey{{SecretKeyRef: ref}, {SecretKeyRef: ref}}, AllowedOrigins: []string{name}}}, &v1beta1.WebhookDestination{ObjectMeta: metav1.ObjectMeta{Name: "d"}, Spec: v1beta1.WebhookDestinationSpec{
				SourceRefs: []v1beta1.SourceReference{{Name: name}, {Name: "a"}},
				Endpoints: []v1beta1.Endpoint{
					{Name: name, URL: string(secret)},
					{Name: "x", URLFrom: from, Headers: []v1beta1.Header{{Name: header, ValueFrom: from}, {Name: "X-B", Value: &header}},
						TLS: &v1beta1.EndpointTLS{CA: &v1beta1.CertificateAuthorities{SecretKeyRef: &ref},
							ClientCertSecretRef: &v1beta1.SecretReference{Name: "s"}}},
				},
				Signing: &v1beta1.Signing{Schemes: []v1beta1.SigningScheme{{Name: name, Type: v1beta1.SigningType(name), SecretKeyRef: ref},
					{Name: "sha1", Type: v1beta1.HMACSHA1, SecretKeyRef: ref, PreviousSecretKeyRef: &ref}}},
				Delivery: v1beta1.Delivery{MaxInFlight: int32(number), Timeout: &v1beta1.Duration{Duration: 1},
					RateLimit: &v1beta1.RequestRateLimit{RequestsPerSecond: int32(number)}},
				Filter: &v1beta1.Filter{Expression: expression, Events: []string{header}},
			}}},
		}
		config, verdicts := table.Compile(s)
		data, _, err := liveconfig.Encode(config)
		if err != nil {
			t.Fatal(err)
		}
		if _, _, err := liveconfig.Decode(data); err != nil {
			t.Fatal(err)
		}
		if len(verdicts["sources"]) != 1 || len(verdicts["destinations"]) != 1 {
			t.Fatal("an object has no verdict")
		}
		if text := verdicts["destinations"]["d"].Message + verdicts["sources"]["a"].Message; len(secret) > 8 &&
			!bytes.Contains([]byte(name+header+expression), secret) && strings.Contains(text, string(secret)) {
			t.Fatalf("a message contains the secret: %s", text)
		}
	})
}

func clone(s Snapshot) Snapshot {
	out := s
	out.Objects = nil
	for _, o := range s.Objects {
		out.Objects = append(out.Objects, o.DeepCopyObject().(Object))
	}
	out.Secrets = map[string]Secret{}
	for name, secret := range s.Secrets {
		data := map[string][]byte{}
		for key, value := range secret.Data {
			data[key] = bytes.Clone(value)
		}
		out.Secrets[name] = Secret{Version: secret.Version, Data: data}
	}
	return out
}

// The API and the dispatchers have the same built-in Sources.
func TestBuiltInSources(t *testing.T) {
	for _, name := range append(slices.Clone(v1beta1.BuiltInSources), "web") {
		if got, want := liveconfig.BuiltIn(name), name != "web"; got != want {
			t.Errorf("Source %q is built in: got %t, want %t", name, got, want)
		}
	}
}
