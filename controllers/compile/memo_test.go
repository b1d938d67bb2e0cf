package compile

import (
	"bytes"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/liveconfig"
)

// A compilation with a Memo has the results of one without, and compiles only what changed.
func TestMemo(t *testing.T) {
	const n = 50
	s, table := largeNamespace(n), Table{Sources, Destinations, Audiences, Deletions, Redeliveries}
	compiled := 0
	s.CheckHost = func(string) error { compiled++; return nil }
	edit := func(i int, change func(*v1beta1.WebhookDestination)) {
		d := s.Objects[1+i].DeepCopyObject().(*v1beta1.WebhookDestination)
		change(d)
		s.Objects[1+i] = d
	}
	memo := &Memo{}
	for _, step := range []struct {
		name   string
		change func()
		want   int
	}{
		{"first", func() {}, n},
		{"nothing", func() {}, 0},
		{"an edit", func() {
			edit(3, func(d *v1beta1.WebhookDestination) { d.Generation, d.Spec.Endpoints[0].URL = 2, "https://b.example" })
		}, 1},
		{"a status", func() { edit(3, func(d *v1beta1.WebhookDestination) { d.ResourceVersion = "9" }) }, 0},
		{"another object with the name", func() { edit(3, func(d *v1beta1.WebhookDestination) { d.UID = "other" }) }, 1},
		{"a Secret", func() {
			s.Secrets["destination-00004"] = Secret{Version: "2", Data: map[string][]byte{"key": []byte("new")}}
		}, 1},
		{"a deleted Secret", func() { delete(s.Secrets, "destination-00005") }, 1},
		{"a restored Secret", func() { s.Secrets["destination-00005"] = s.Secrets["destination-00004"] }, 1},
		{"a forward target that does not exist", func() {
			edit(6, func(d *v1beta1.WebhookDestination) {
				d.Generation, d.Spec.DeadLetters.ForwardTo = 2,
					&v1beta1.ForwardTo{DestinationRef: v1beta1.ObjectReference{Name: "destination-00007x"}}
			})
		}, 1},
		{"its creation", func() {
			edit(7, func(d *v1beta1.WebhookDestination) { d.Name, d.UID = "destination-00007x", "target" })
		}, 2},
		{"its acceptance", func() {
			edit(7, func(d *v1beta1.WebhookDestination) {
				d.Generation, d.Spec.SourceRefs = 2, append(d.Spec.SourceRefs, v1beta1.SourceReference{Name: liveconfig.SourceDeadLetters})
			})
		}, 2},
		{"its deletion", func() {
			edit(7, func(d *v1beta1.WebhookDestination) { d.Name, d.UID = "destination-00007", "another" })
		}, 2},
		{"a label of a Source", func() {
			source := s.Objects[0].DeepCopyObject().(*v1beta1.Source)
			source.Labels = map[string]string{"team": "shop"}
			s.Objects[0] = source
		}, n},
		{"a deletion", func() { s.Objects = s.Objects[:n] }, 0},
		{"the deletion of the Source", func() { s.Objects = s.Objects[1:] }, n - 1},
		{"nothing again", func() {}, 0},
	} {
		t.Run(step.name, func(t *testing.T) {
			step.change()
			s.Memo = nil
			wantConfig, wantVerdicts := table.Compile(s)
			s.Memo, compiled = memo, 0
			config, verdicts := table.Compile(s)
			if compiled != step.want {
				t.Errorf("compiled destinations: got %d, want %d", compiled, step.want)
			}
			if diff := cmp.Diff(wantVerdicts, verdicts); diff != "" {
				t.Errorf("verdicts (-want +got):\n%s", diff)
			}
			want, _, err := (*Memo)(nil).encode(wantConfig)
			if err != nil {
				t.Fatal(err)
			}
			got, _, err := memo.encode(config)
			if err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(got.Bytes(), want.Bytes()) {
				t.Error("the encoded config differs from that without a memo")
			}
			if len(memo.destinations) != len(config.Destinations) {
				t.Errorf("kept destinations: got %d, want %d", len(memo.destinations), len(config.Destinations))
			}
		})
	}
}
