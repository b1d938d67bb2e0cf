package compile

import (
	"fmt"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/liveconfig"
)

// largeNamespace returns a namespace with a Source and n destinations, each with a Secret and a filter.
func largeNamespace(n int) Snapshot {
	s := Snapshot{Namespace: "shop", Secrets: map[string]Secret{"web": {Version: "1", Data: map[string][]byte{"key": []byte("write-key")}}}}
	meta := func(name string, i int) metav1.ObjectMeta {
		return metav1.ObjectMeta{Namespace: "shop", Name: name, Generation: 1,
			UID: types.UID(fmt.Sprintf("9c1b8f2e-0000-4000-8000-%012x", i*7919))}
	}
	s.Objects = append(s.Objects, &v1beta1.Source{ObjectMeta: meta("web", 0), Spec: v1beta1.SourceSpec{
		WriteKeys: []v1beta1.WriteKey{{Name: "main", SecretKeyRef: v1beta1.SecretKeyReference{Name: "web", Key: "key"}}},
	}})
	for i := range n {
		name := fmt.Sprintf("destination-%05d", i)
		expression := fmt.Sprintf(`properties.value > %d`, i)
		s.Secrets[name] = Secret{Version: "1", Data: map[string][]byte{"key": fmt.Appendf(nil, "secret-%d-%x", i, i*7919*104729)}}
		s.Objects = append(s.Objects, &v1beta1.WebhookDestination{ObjectMeta: meta(name, i+1), Spec: v1beta1.WebhookDestinationSpec{
			SourceRefs: []v1beta1.SourceReference{{Name: "web"}},
			Endpoints:  []v1beta1.Endpoint{{Name: "primary", URL: fmt.Sprintf("https://hooks.example/%d/in", i)}},
			Signing: &v1beta1.Signing{Schemes: []v1beta1.SigningScheme{{
				Name: "sha1", Type: "HMACSHA1", SecretKeyRef: v1beta1.SecretKeyReference{Name: name, Key: "key"},
			}}},
			Filter: &v1beta1.Filter{Types: []v1beta1.CallType{"track"}, Expression: expression},
		}})
	}
	return s
}

// BenchmarkEdit measures an edit of one destination without the API server: from the objects of its
// namespace to the encoded live config and its head. The other namespaces cost nothing.
func BenchmarkEdit(b *testing.B) {
	for _, n := range []int{200, 10_000} {
		b.Run(fmt.Sprintf("%d", n), func(b *testing.B) {
			s, table := largeNamespace(n), Table{Sources, Destinations, Audiences, Deletions, Redeliveries}
			s.Memo = &Memo{}
			var h History
			d, now := Dispatchers{}, time.Now()
			for i := 0; b.Loop(); i++ {
				edited := s.Objects[1+i%n].DeepCopyObject().(*v1beta1.WebhookDestination)
				edited.Generation++
				edited.Spec.Endpoints[0].URL = fmt.Sprintf("https://hooks.example/edited/%d", i)
				s.Objects[1+i%n] = edited

				config, verdicts := table.Compile(s)
				present := Present{UIDs: table.Existing(s.Objects), Reserved: h.Reserve(config, d, func(string) bool { return false }, now)}
				size := func(h History, exact bool) (int, error) { return h.HeadBytes(exact, present, d, now, TombstoneGrace) }
				encoded, history, err := table.EncodeWithHead(s.Memo, config, verdicts, DefaultLimit, h, size, nil)
				if err != nil {
					b.Fatal(err)
				}
				head, _ := history.Next(encoded.Revision, present, d, now, TombstoneGrace)
				if _, err := liveconfig.EncodeHead(head); err != nil {
					b.Fatal(err)
				}
				h = HistoryOf(liveconfig.Revisioned{Config: encoded.Config, Revision: encoded.Revision, Head: head})
				h.Verified = true
				b.ReportMetric(float64(encoded.Chunks.Len()), "bytes")
			}
		})
	}
}
