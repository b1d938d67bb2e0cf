package liveconfig

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// incompressible returns a config with n destinations whose URLs have random texts of 100 to 8,000 bytes.
func incompressible(n int, random *rand.Rand) Config {
	c := many(n)
	for i := range c.Destinations {
		c.Destinations[i] = withNoise(c.Destinations[i], random)
	}
	return c
}

func withNoise(d Destination, random *rand.Rand) Destination {
	noise := make([]byte, 100+random.IntN(7900))
	for i := range noise {
		noise[i] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_"[random.IntN(64)]
	}
	d.Endpoints = slices.Clone(d.Endpoints)
	d.Endpoints[0].URL = NewSecret("https://hooks.example/" + string(noise))
	d.Revision = fmt.Sprintf("%016x", random.Uint64())
	return d
}

// secrets are the Secrets of a live config: the data of the parts by name, and the data of the root.
type secrets struct {
	root  map[string][]byte
	parts map[string]map[string][]byte
}

// store returns the Secrets of a config with parts of up to partBytes, and checks their sizes and names.
func store(t *testing.T, e *Encoder, c Config, partBytes int) secrets {
	t.Helper()
	chunks, revision, err := e.EncodeChunks(c)
	if err != nil {
		t.Fatal(err)
	}
	parts, ok, err := chunks.Split(c.Namespace, partBytes, 2*partBytes, MaxParts)
	if !ok || err != nil {
		t.Fatalf("Split of %d bytes: %v (%v), want parts", chunks.Len(), ok, err)
	}
	head, err := EncodeHead(Head{Number: 1, Revision: revision})
	if err != nil {
		t.Fatal(err)
	}
	s := secrets{root: RootData(chunks, parts, head), parts: map[string]map[string][]byte{}}
	for _, part := range parts.List {
		s.parts[part.Name] = part.Data()
		if n := len(s.parts[part.Name][PartKey]); n > partBytes && len(part.chunks) > 1 || n > 2*partBytes {
			t.Errorf("part of %d chunks: got %d bytes, want at most %d", len(part.chunks), n, partBytes)
		}
		if namespace, ok := PartNamespaceOf(part.Name); !ok || namespace != c.Namespace {
			t.Errorf("PartNamespaceOf(%q) = %q, %v; want %q", part.Name, namespace, ok, c.Namespace)
		}
	}
	if !bytes.Equal(s.assemble(c.Namespace).Config, chunks.Bytes()) {
		t.Error("the assembled parts are not the encoded config")
	}
	if got, want := PartNames(c.Namespace, s.root), len(s.parts); len(got) != want {
		t.Errorf("PartNames: got %d names, want %d", len(got), want)
	}
	return s
}

func (s secrets) assemble(namespace string) Stored {
	return Assemble(namespace, s.root, func(name string) map[string][]byte { return s.parts[name] })
}

// newIn returns the number of parts that are not in before.
func (s secrets) newIn(before secrets) (n int) {
	for name := range s.parts {
		if _, known := before.parts[name]; !known {
			n++
		}
	}
	return n
}

// A change of one object writes few parts, whatever it does to the sizes, and the parts depend on the
// config only.
func TestSplitIsStable(t *testing.T) {
	const partBytes, steps = 96 << 10, 40
	random := rand.New(rand.NewPCG(1, 2))
	c := incompressible(200, random)
	var e Encoder
	before := store(t, &e, c, partBytes)
	if n := len(before.parts); n < 8 {
		t.Fatalf("got %d parts, want at least 8", n)
	}
	written := 0
	for i := range steps {
		at := random.IntN(len(c.Destinations))
		switch c.Destinations = slices.Clone(c.Destinations); i % 4 {
		case 0:
			d := withNoise(c.Destinations[at], random)
			d.Name = fmt.Sprintf("%s-%d", d.Name, i)
			c.Destinations = slices.Insert(c.Destinations, at+1, d)
		case 1:
			c.Destinations = slices.Delete(c.Destinations, at, at+1)
		default:
			c.Destinations[at] = withNoise(c.Destinations[at], random)
		}
		after := store(t, &e, c, partBytes)
		if i%20 == 19 {
			if diff := cmp.Diff(store(t, &Encoder{}, c, partBytes).root, after.root); diff != "" {
				t.Fatalf("step %d: the root depends on earlier configs:\n%s", i, diff)
			}
			live, err := after.assemble(c.Namespace).Decode()
			if err != nil {
				t.Fatalf("step %d: Decode: %v", i, err)
			}
			if diff := cmp.Diff(c, live.Config); diff != "" {
				t.Fatalf("step %d: config (-want +got):\n%s", i, diff)
			}
		}
		n := after.newIn(before)
		if n < 1 && i%4 != 1 || n > 4 { // An end of a chunk appears or disappears in two parts, each may be divided.
			t.Errorf("step %d: new parts: got %d of %d, want 1 to 4", i, n, len(after.parts))
		}
		written += n
		before = after
	}
	if mean := float64(written) / steps; mean > 1.6 {
		t.Errorf("new parts per change: got %.2f, want about 1", mean)
	}
}

// While a namespace grows, a part that becomes too large is divided, and the others remain.
func TestSplitWhileGrowing(t *testing.T) {
	const partBytes = 96 << 10
	random := rand.New(rand.NewPCG(3, 4))
	all := incompressible(250, random)
	c := all
	var e Encoder
	var before secrets
	written, objects := 0, 0
	for n := 40; n <= len(all.Destinations); n += 10 {
		c.Destinations = all.Destinations[:n]
		after := store(t, &e, c, partBytes)
		if before.parts != nil {
			written += after.newIn(before)
			objects += 10
		}
		before = after
	}
	if n := len(before.parts); n < 8 {
		t.Errorf("got %d parts, want at least 8", n)
	}
	if written > 2*objects {
		t.Errorf("parts written for %d new objects: got %d, want at most two for each", objects, written)
	}
}

func TestSplitLimits(t *testing.T) {
	c := incompressible(100, rand.New(rand.NewPCG(5, 6)))
	chunks, _, err := new(Encoder).EncodeChunks(c)
	if err != nil {
		t.Fatal(err)
	}
	largest := 0
	for _, chunk := range chunks {
		largest = max(largest, len(chunk.Data))
	}
	for name, test := range map[string]struct {
		partBytes, chunkBytes, most int
		want                        bool
	}{
		"one part":                    {chunks.Len(), 0, 1, true},
		"one byte too much":           {chunks.Len() - 1, chunks.Len(), 1, false},
		"every chunk is a part":       {0, largest, len(chunks), true},
		"a chunk too much":            {0, largest, len(chunks) - 1, false},
		"a chunk that is too large":   {0, largest - 1, len(chunks), false},
		"parts of equal size, enough": {chunks.Len() / 4, largest, MaxParts, true},
	} {
		if _, got, err := chunks.Split("shop", test.partBytes, test.chunkBytes, test.most); got != test.want || err != nil {
			t.Errorf("%s: got %v (%v), want %v", name, got, err, test.want)
		}
	}
	if chunks[0].text = maxDecodedBytes; chunks.Decodable() {
		t.Error("a text that is larger than Decode accepts is decodable")
	}
}

// Equal configs of two namespaces have parts with different names.
func TestPartsBelongToANamespace(t *testing.T) {
	chunks, _, err := new(Encoder).EncodeChunks(many(1))
	if err != nil {
		t.Fatal(err)
	}
	shop, _, _ := chunks.Split("shop", 1<<20, 1<<20, 1)
	bank, _, _ := chunks.Split("bank", 1<<20, 1<<20, 1)
	if shop.List[0].Name == bank.List[0].Name {
		t.Errorf("both parts have the name %s", shop.List[0].Name)
	}
	for _, name := range []string{SecretName("shop"), SecretName("part-shop"), MarkerName, "posthorn-part-shop",
		"posthorn-part-shop-" + strings.Repeat("x", 64), "posthorn-part--" + strings.Repeat("0", 64)} {
		if namespace, ok := PartNamespaceOf(name); ok {
			t.Errorf("PartNamespaceOf(%q) = %q, true; want false", name, namespace)
		}
	}
	for _, namespace := range []string{"shop", "a-b", "0"} {
		parts, _, _ := chunks.Split(namespace, 1<<20, 1<<20, 1)
		if got, ok := NamespaceOf(parts.List[0].Name); ok {
			t.Errorf("NamespaceOf(%q) = %q, true; want false", parts.List[0].Name, got)
		}
	}
}

// A live config is accepted only with every part and the content that its root lists.
func TestAssembleRejects(t *testing.T) {
	c := incompressible(60, rand.New(rand.NewPCG(7, 8)))
	full := store(t, &Encoder{}, c, 96<<10)
	names := PartNames(c.Namespace, full.root)
	with := func(key string, data []byte) secrets {
		s := secrets{root: map[string][]byte{HeadKey: full.root[HeadKey], IndexKey: full.root[IndexKey]}, parts: map[string]map[string][]byte{}}
		for name, part := range full.parts {
			s.parts[name] = part
		}
		switch {
		case key == IndexKey:
			s.root[IndexKey] = data
		case data == nil:
			delete(s.parts, key)
		default:
			s.parts[key] = map[string][]byte{PartKey: data}
		}
		return s
	}
	index := func(text string) []byte {
		data, err := compress([]byte(text))
		if err != nil {
			t.Fatal(err)
		}
		return data
	}
	original := full.parts[names[1]][PartKey]
	other := full.parts[names[0]][PartKey]
	for len(other) < len(original) {
		other = append(slices.Clone(other), other...)
	}
	for name, test := range map[string]struct {
		secrets    secrets
		want       string
		incomplete bool
	}{
		"missing part":     {with(names[1], nil), "Secret " + names[1] + ", does not exist", true},
		"shorter part":     {with(names[1], original[:10]), "other content than the index lists", false},
		"other part":       {with(names[1], other), "", false},
		"damaged part":     {with(names[1], bytes.Repeat([]byte("x"), len(original))), "", false},
		"damaged index":    {with(IndexKey, []byte("x")), "not gzip", false},
		"invalid index":    {with(IndexKey, index("[")), "is invalid", false},
		"index of version": {with(IndexKey, index(`{"version":2}`)), "version 2", false},
		"unknown part":     {with(IndexKey, index(`{"version":1,"parts":["a"],"chunks":[[1,1]]}`)), "has chunk [1 1] and 1 parts", false},
		"negative length":  {with(IndexKey, index(`{"version":1,"parts":["a"],"chunks":[[0,-1]]}`)), "has chunk [0 -1]", false},
	} {
		t.Run(name, func(t *testing.T) {
			stored := test.secrets.assemble(c.Namespace)
			live, err := stored.Decode()
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("got error %v, want one with %q", err, test.want)
			}
			if stored.Incomplete() != test.incomplete {
				t.Errorf("Incomplete: got %v, want %v", stored.Incomplete(), test.incomplete)
			}
			if live.Head.Number != 1 {
				t.Errorf("number of the head: got %d, want 1", live.Head.Number)
			}
		})
	}
}

// The Secrets of a small config are as before parts existed.
func TestRootDataOfOneSecret(t *testing.T) {
	c := many(3)
	chunks, _, err := new(Encoder).EncodeChunks(c)
	if err != nil {
		t.Fatal(err)
	}
	data, _, _ := Encode(c)
	want := map[string][]byte{DataKey: data, HeadKey: []byte("head")}
	got := RootData(chunks, Parts{}, []byte("head"))
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("data (-want +got):\n%s", diff)
	}
	if stored := Assemble("shop", got, nil); !bytes.Equal(stored.Config, data) {
		t.Error("Assemble returns another config")
	}
}
