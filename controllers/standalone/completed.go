package standalone

import (
	"fmt"
	"maps"
	"slices"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/controllers/compile"
	"github.com/posthorn/posthorn/controllers/manifest"
)

// Placeholder is the value of each key of a Secret that the manifests of CompileDestinations lack; the URL of an endpoint
// is PlaceholderURL.
const (
	Placeholder    = "posthorn-placeholder"
	PlaceholderURL = "https://placeholder.invalid/"
)

// Completed is the result of CompileDestinations.
type Completed struct {
	// Configs of the namespaces, with every destination that is accepted in the state Active.
	Configs []liveconfig.Config
	// Problems prevent a compilation, and NotAccepted are the conditions of destinations that are False.
	Problems, NotAccepted []manifest.Problem
	// Placeholders are the keys of Secrets ("NAMESPACE/NAME/KEY") that have a placeholder, sorted.
	Placeholders []string
}

// CompileDestinations compiles the destinations of a folder of manifests, or one file, as Compile does. Objects that
// the manifests lack are added: Sources, and placeholders for Secrets. TLS settings and suspensions, on which requests do not
// depend, are left out.
func CompileDestinations(path string, values []SecretValue, policy compile.Policy) (out Completed, err error) {
	s, err := loadOnce(path, values)
	if err != nil {
		return out, err
	}
	out.Problems = s.problems
	snapshots, at := s.snapshots(policy), s.positions()
	for _, namespace := range slices.Sorted(maps.Keys(snapshots)) {
		c := completion{snapshot: snapshots[namespace].Snapshot, added: map[string]bool{}}
		for _, o := range slices.Clone(c.snapshot.Objects) {
			if d, ok := o.(*v1beta1.WebhookDestination); ok {
				c.destination(d)
			}
		}
		for key := range c.added {
			out.Placeholders = append(out.Placeholders, namespace+"/"+key)
		}
		config, verdicts := compilers.Compile(c.snapshot)
		out.Configs = append(out.Configs, config)
		verdicts = compile.Verdicts{liveconfig.SectionDestinations: verdicts[liveconfig.SectionDestinations]}
		problems, _ := at.judged(namespace, verdicts)
		out.NotAccepted = append(out.NotAccepted, problems...)
	}
	slices.Sort(out.Placeholders)
	return out, nil
}

// completion adds to a snapshot what the requests of destinations need.
type completion struct {
	snapshot compile.Snapshot
	// added are the keys of Secrets ("NAME/KEY") that were added.
	added map[string]bool
}

func (c *completion) destination(d *v1beta1.WebhookDestination) {
	d.Spec.Suspend = nil
	for _, ref := range d.Spec.SourceRefs {
		c.source(ref.Name, nil)
	}
	if selector := d.Spec.SourceSelector; selector != nil && !slices.ContainsFunc(c.snapshot.Objects, isSource) {
		c.source("any", selector.MatchLabels)
	}
	for i := range d.Spec.Endpoints {
		e := &d.Spec.Endpoints[i]
		e.TLS = nil
		if e.URLFrom != nil {
			c.key(e.URLFrom.SecretKeyRef, PlaceholderURL)
		}
		for _, h := range e.Headers {
			if h.ValueFrom != nil {
				c.key(h.ValueFrom.SecretKeyRef, Placeholder)
			}
		}
		if a := e.Authentication; a != nil {
			switch {
			case a.Bearer != nil:
				c.key(a.Bearer.SecretKeyRef, Placeholder)
			case a.Basic != nil:
				c.key(v1beta1.SecretKeyReference{Name: a.Basic.SecretRef.Name, Key: "username"}, Placeholder)
				c.key(v1beta1.SecretKeyReference{Name: a.Basic.SecretRef.Name, Key: "password"}, Placeholder)
			case a.OAuth2 != nil:
				a.OAuth2.TLS = nil
				c.key(a.OAuth2.ClientSecretKeyRef, Placeholder)
			}
		}
	}
	if d.Spec.Redact != nil && d.Spec.Redact.Hash != nil {
		c.key(d.Spec.Redact.Hash.SecretKeyRef, Placeholder)
	}
	if d.Spec.Signing == nil {
		return
	}
	for _, scheme := range d.Spec.Signing.Schemes {
		c.key(scheme.SecretKeyRef, Placeholder)
		if scheme.PreviousSecretKeyRef != nil {
			c.key(*scheme.PreviousSecretKeyRef, Placeholder)
		}
	}
}

func isSource(o compile.Object) bool {
	_, ok := o.(*v1beta1.Source)
	return ok
}

// source adds a Source if there is none of its name.
func (c *completion) source(name string, labels map[string]string) {
	if liveconfig.BuiltIn(name) || slices.ContainsFunc(c.snapshot.Objects, func(o compile.Object) bool {
		return isSource(o) && o.GetName() == name
	}) {
		return
	}
	s := &v1beta1.Source{}
	s.Namespace, s.Name, s.Labels = c.snapshot.Namespace, name, labels
	c.snapshot.Objects = append(c.snapshot.Objects, s)
}

// key adds a key of a Secret if it is missing.
func (c *completion) key(ref v1beta1.SecretKeyReference, value string) {
	s := c.snapshot.Secrets[ref.Name]
	if _, ok := s.Data[ref.Key]; ok {
		return
	}
	if s.Data = maps.Clone(s.Data); s.Data == nil {
		s.Data = map[string][]byte{}
	}
	s.Data[ref.Key] = []byte(value)
	c.snapshot.Secrets[ref.Name] = s
	c.added[fmt.Sprintf("%s/%s", ref.Name, ref.Key)] = true
}
