package configsource

import (
	"log/slog"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes/fake"

	"github.com/posthorn/posthorn/dispatcher/liveconfig"
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
