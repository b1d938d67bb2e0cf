package configsource

import (
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/test/wait"
)

// recorder is a Sink that records its calls.
type recorder chan string

func (s recorder) Set(namespace string, stored liveconfig.Stored) {
	s <- "set " + namespace + " " + string(stored.Config) + string(stored.Head)
}
func (s recorder) Delete(namespace string) { s <- "delete " + namespace }
func (s recorder) Synced(failed ...string) {
	s <- strings.Join(append([]string{"synced"}, failed...), " ")
}

func (s recorder) expect(t *testing.T, want ...string) {
	t.Helper()
	var got []string
	for range want {
		select {
		case g := <-s:
			got = append(got, g)
		case <-time.After(wait.Limit):
			t.Fatalf("got %q, want %q", got, want)
		}
	}
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

// A copy of a namespace's Secret, which has all of its labels, neither changes the
// namespace's config nor removes it when it is deleted.
func TestCopiesOfASecretMeanNothing(t *testing.T) {
	secret := func(name, namespace, data string) *corev1.Secret {
		labels := map[string]string{liveconfig.LabelLive: "true"}
		if namespace != "" {
			labels[liveconfig.LabelNamespace] = namespace
		}
		return &corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "posthorn-system", Labels: labels, ResourceVersion: data},
			Data:       map[string][]byte{liveconfig.DataKey: []byte(data)},
		}
	}
	shop, bank := liveconfig.SecretName("shop"), liveconfig.SecretName("bank")
	client := fake.NewClientset(
		secret(shop, "shop", "1"), secret(strings.TrimSuffix(shop, "shop")+"copy", "shop", "2"),
		secret(bank, "bank", "3"), secret("backup", "bank", "4"), secret(liveconfig.MarkerName, "", ""),
	)
	sink := make(recorder, 100)
	ended := make(chan error, 1)
	go func() {
		ended <- Watch(t.Context(), client, "posthorn-system", sink, slog.New(slog.DiscardHandler))
	}()
	sink.expect(t, "set shop 1", "set bank 3", "synced")
	secrets := client.CoreV1().Secrets("posthorn-system")
	if err := secrets.Delete(t.Context(), "backup", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	if _, err := secrets.Update(t.Context(), secret(shop, "shop", "5"), metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	sink.expect(t, "set shop 5")
	if err := secrets.Delete(t.Context(), bank, metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	sink.expect(t, "delete bank")
	if len(sink) > 0 {
		t.Errorf("got %q, want no more", <-sink)
	}
}

// partsOf returns the root and the parts of a live config of namespace shop: the names of its
// destinations make it larger than one part.
func partsOf(t *testing.T, number int64, destinations ...string) (root *corev1.Secret, parts []*corev1.Secret) {
	t.Helper()
	c := liveconfig.Config{Version: liveconfig.FormatVersion, Namespace: "shop"}
	for _, name := range destinations {
		// A text of 64 KiB is a chunk of its own.
		c.Destinations = append(c.Destinations, liveconfig.Destination{Name: name, Revision: name, State: liveconfig.Suspended,
			Success:   liveconfig.AnyEndpoint,
			Delivery:  liveconfig.Delivery{RetryWindowMS: 1},
			Endpoints: []liveconfig.Endpoint{{Name: "e", URL: liveconfig.NewSecret(strings.Repeat(name, 64<<10))}}})
	}
	chunks, revision, err := new(liveconfig.Encoder).EncodeChunks(c)
	if err != nil {
		t.Fatal(err)
	}
	split, ok, err := chunks.Split("shop", 0, 1<<20, liveconfig.MaxParts)
	if !ok || err != nil {
		t.Fatalf("Split: %v (%v), want parts", ok, err)
	}
	head, err := liveconfig.EncodeHead(liveconfig.Head{Number: number, Revision: revision})
	if err != nil {
		t.Fatal(err)
	}
	secret := func(name string, data map[string][]byte) *corev1.Secret {
		return &corev1.Secret{
			ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "posthorn-system", Labels: map[string]string{liveconfig.LabelLive: "true"},
				ResourceVersion: fmt.Sprint(number)},
			Data: data,
		}
	}
	for _, part := range split.List {
		parts = append(parts, secret(part.Name, part.Data()))
	}
	return secret(liveconfig.SecretName("shop"), liveconfig.RootData(chunks, split, head)), parts
}

// decoder is a Sink that records the numbers and destinations of the configs.
type decoder struct{ recorder }

func (s decoder) Set(namespace string, stored liveconfig.Stored) {
	live, err := stored.Decode()
	if stored.Incomplete() {
		s.recorder <- fmt.Sprintf("incomplete %s %d", namespace, live.Head.Number)
		return
	}
	if err != nil {
		s.recorder <- "error " + err.Error()
		return
	}
	text := fmt.Sprintf("set %s %d", namespace, live.Head.Number)
	for _, d := range live.Destinations {
		text += " " + d.Name
	}
	s.recorder <- text
}

// A config in parts is passed on as a whole, whatever the order of the Secrets, and a missing part is
// reported.
func TestParts(t *testing.T) {
	root1, parts1 := partsOf(t, 1, "a", "b", "c")
	root2, parts2 := partsOf(t, 2, "a", "b", "d")
	objects := []runtime.Object{root1, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: liveconfig.MarkerName, Namespace: "posthorn-system",
		Labels: map[string]string{liveconfig.LabelLive: "true"}}}}
	for _, part := range parts1 {
		objects = append(objects, part)
	}
	client := fake.NewClientset(objects...)
	sink := decoder{make(recorder, 100)}
	ended := make(chan error, 1)
	go func() {
		ended <- Watch(t.Context(), client, "posthorn-system", sink, slog.New(slog.DiscardHandler))
	}()
	sink.expect(t, "set shop 1 a b c", "synced")

	secrets := client.CoreV1().Secrets("posthorn-system")
	check := func(_ any, err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	remove := func(name string) {
		t.Helper()
		check(nil, secrets.Delete(t.Context(), name, metav1.DeleteOptions{}))
	}
	names := map[string]bool{}
	for _, part := range parts1 {
		names[part.Name] = true
	}
	var added *corev1.Secret
	for _, part := range parts2 {
		if !names[part.Name] {
			added = part
			check(secrets.Create(t.Context(), part, metav1.CreateOptions{}))
		}
		delete(names, part.Name)
	}
	check(secrets.Update(t.Context(), root2, metav1.UpdateOptions{}))
	sink.expect(t, "set shop 2 a b d")
	for old := range names {
		remove(old) // The root does not list it.
	}

	remove(added.Name)
	sink.expect(t, "incomplete shop 2")
	check(secrets.Create(t.Context(), added, metav1.CreateOptions{}))
	sink.expect(t, "set shop 2 a b d")
	remove(root2.Name)
	sink.expect(t, "delete shop")
	remove(added.Name)
	check(secrets.Create(t.Context(), added, metav1.CreateOptions{}))
	check(secrets.Create(t.Context(), root2, metav1.CreateOptions{}))
	sink.expect(t, "set shop 2 a b d")
	if len(sink.recorder) > 0 {
		t.Errorf("got %q, want no more", <-sink.recorder)
	}
}

// A config that lacks a part at the start is reported before Synced, and set when the part exists.
func TestPartsAtTheStart(t *testing.T) {
	root, parts := partsOf(t, 1, "a", "b")
	objects := []runtime.Object{root, &corev1.Secret{ObjectMeta: metav1.ObjectMeta{Name: liveconfig.MarkerName, Namespace: "posthorn-system",
		Labels: map[string]string{liveconfig.LabelLive: "true"}}}}
	for _, part := range parts[1:] {
		objects = append(objects, part)
	}
	client := fake.NewClientset(objects...)
	sink := decoder{make(recorder, 100)}
	ended := make(chan error, 1)
	go func() {
		ended <- Watch(t.Context(), client, "posthorn-system", sink, slog.New(slog.DiscardHandler))
	}()
	for _, want := range []string{"incomplete shop 1", "synced"} {
		sink.expect(t, want)
	}
	if _, err := client.CoreV1().Secrets("posthorn-system").Create(t.Context(), parts[0], metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	sink.expect(t, "set shop 1 a b")
}
