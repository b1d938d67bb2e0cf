package controllers

import (
	"bytes"
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	corev1ac "k8s.io/client-go/applyconfigurations/core/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/log"
	"sigs.k8s.io/controller-runtime/pkg/predicate"

	"github.com/posthorn/posthorn/contract/adminapi"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/controllers/compile"
	"github.com/posthorn/posthorn/controllers/health"
)

// liveSecrets reads and writes the Secrets of the live configs.
type liveSecrets struct {
	client  client.Client // reads from the cache, only metadata
	direct  client.Reader // reads from the API server
	release string
	owner   secretOwner
	parts   *partSecrets
	budget  *configBudget

	mu sync.Mutex
	// written are the live-config Secrets that this process has written or verified.
	written map[string]liveSecret
}

// liveSecret identifies the content of a live-config Secret.
type liveSecret struct {
	revision, resourceVersion string
	history                   compile.History
	// release is the value of the annotation that ends reservations of write keys; empty if it is
	// processed.
	release string
}

// released reports whether an administrator has ended the reservation of a write key.
func (s liveSecret) released(hash string) bool {
	list := strings.FieldsFunc(s.release, func(r rune) bool { return r == ',' || unicode.IsSpace(r) })
	return slices.Contains(list, hash) || slices.Contains(list, liveconfig.ReleaseAll)
}

// key returns the name of a namespace's live-config Secret, which is the root if it has parts.
func (s *liveSecrets) key(namespace string) types.NamespacedName {
	return types.NamespacedName{Namespace: s.release, Name: liveconfig.SecretName(namespace)}
}

// last returns the namespace's last live config. Its resource version is empty if there is no
// Secret. The newer one of the Secret's config and the last one of this process counts: another
// client may have replaced the Secret by one from a backup, or deleted it.
func (s *liveSecrets) last(ctx context.Context, namespace string) (liveSecret, error) {
	m := secretMetadata()
	if err := s.client.Get(ctx, s.key(namespace), m); client.IgnoreNotFound(err) != nil {
		return liveSecret{}, fmt.Errorf("look up Secret %s: %w", s.key(namespace), err)
	}
	s.mu.Lock()
	last := s.written[namespace]
	s.mu.Unlock()
	if last.resourceVersion != "" && last.resourceVersion == m.ResourceVersion {
		return last, nil
	}
	found, _, err := s.read(ctx, namespace)
	switch {
	case err != nil:
		return liveSecret{}, err
	case found.resourceVersion == "":
		return liveSecret{history: last.history}, nil
	case last.history.Known && (!found.history.Known || found.history.Head.Number < last.history.Head.Number):
		found.history = last.history
	default:
		found.history.Verified = last.history.Verified && found.history.Head.Number == last.history.Head.Number
	}
	return found, nil
}

// read reads a namespace's live config. Its resource version is empty if there is none. If it does not decode, or
// belongs to another namespace, its history is unknown and the config is empty, because no dispatcher runs such a config.
func (s *liveSecrets) read(ctx context.Context, namespace string) (found liveSecret, config liveconfig.Config, err error) {
	var secret corev1.Secret
	if err := s.direct.Get(ctx, s.key(namespace), &secret); apierrors.IsNotFound(err) {
		return found, config, nil
	} else if err != nil {
		return found, config, fmt.Errorf("read Secret %s: %w", s.key(namespace), err)
	}
	stored, err := s.parts.assemble(ctx, namespace, &secret)
	if err != nil {
		return found, config, err
	}
	found = liveSecret{resourceVersion: secret.ResourceVersion, release: secret.Annotations[liveconfig.AnnotationRelease]}
	if live, err := stored.Decode(); err == nil && live.Namespace == namespace {
		found.history, config = compile.HistoryOf(live), live.Config
	}
	return found, config, nil
}

// liveUpdate is a write of a live config.
type liveUpdate struct {
	namespace string
	encoded   compile.Encoded
	head      liveconfig.Head
	// changed is true if the head differs from the last one.
	changed    bool
	last, next liveSecret
	// existing are the parts before the write.
	existing map[string]metav1.PartialObjectMetadata
}

// write applies the Secrets of a namespace's live config if their content differs: the parts, and then
// the root that lists them.
func (s *liveSecrets) write(ctx context.Context, u *liveUpdate) (result string, err error) {
	text, err := liveconfig.EncodeHead(u.head)
	if err != nil {
		return "", err
	}
	data := liveconfig.RootData(u.encoded.Chunks, u.encoded.Parts, text)
	if u.existing, err = s.parts.list(ctx, u.namespace); err != nil {
		return "", err
	}
	missing := s.parts.missing(u.existing, u.encoded.Parts.List)
	u.next.resourceVersion = u.last.resourceVersion
	if !u.changed && u.last.resourceVersion != "" && u.last.revision == u.encoded.Revision && u.last.release == "" && len(missing) == 0 {
		return "unchanged", nil
	}
	// Another client has written the Secret, or the cache lags. Compare the content.
	var current corev1.Secret
	if err := s.direct.Get(ctx, s.key(u.namespace), &current); client.IgnoreNotFound(err) != nil {
		return "", fmt.Errorf("read Secret %s: %w", s.key(u.namespace), err)
	}
	written, err := s.parts.write(ctx, u.namespace, missing)
	if err != nil {
		return "", err
	}
	if written > 0 {
		log.FromContext(ctx).Info("parts of the live config written", "count", written, "of", len(u.encoded.Parts.List))
	}
	u.next.resourceVersion, u.next.release = current.ResourceVersion, current.Annotations[liveconfig.AnnotationRelease]
	root := u.changed || u.last.release != "" || !isLive(&current, u.namespace, data, u.encoded.Revision) || !s.owner.owns(&current)
	if !root && written == 0 {
		return "unchanged", nil
	}
	s.budget.take(u.namespace)
	if root {
		err = s.writeRoot(ctx, u, data)
	}
	return "written", err
}

func (s *liveSecrets) writeRoot(ctx context.Context, u *liveUpdate, data map[string][]byte) error {
	annotations := map[string]string{liveconfig.AnnotationRevision: u.encoded.Revision}
	if u.last.release != "" {
		// The write that ends the reservations also empties the annotation, so that it does
		// not end later ones.
		annotations[liveconfig.AnnotationRelease] = ""
		log.FromContext(ctx).Info("reservations of write keys released by annotation", "annotation", liveconfig.AnnotationRelease, "value",
			u.last.release, "remaining", len(u.head.Reserved))
	}
	wanted := corev1ac.Secret(s.key(u.namespace).Name, s.release).
		WithLabels(map[string]string{liveconfig.LabelLive: "true", liveconfig.LabelNamespace: u.namespace}).
		WithAnnotations(annotations).
		WithData(data)
	if err := s.owner.apply(ctx, s.client, wanted); err != nil {
		return err
	}
	u.next.resourceVersion, u.next.release = *wanted.ResourceVersion, wanted.Annotations[liveconfig.AnnotationRelease]
	log.FromContext(ctx).Info("live config written", "revision", u.encoded.Revision, "number", u.head.Number, "bytes", u.encoded.Chunks.Len(),
		"parts", len(u.encoded.Parts.List))
	return nil
}

// record records the content of a live-config Secret.
func (s *liveSecrets) record(namespace string, secret liveSecret) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.written[namespace] = secret
}

// remove deletes the live config of a namespace without objects, if it still has the last resource version.
func (s *liveSecrets) remove(ctx context.Context, namespace string, last liveSecret) error {
	secret := &corev1.Secret{}
	secret.Namespace, secret.Name = s.release, s.key(namespace).Name
	if err := s.client.Delete(ctx, secret, client.Preconditions{ResourceVersion: &last.resourceVersion}); client.IgnoreNotFound(err) != nil {
		return fmt.Errorf("delete the live config of namespace %s: %w", namespace, err)
	}
	log.FromContext(ctx).Info("live config deleted; the namespace has no objects")
	return nil
}

// removeParts deletes the parts of a namespace without a live config.
func (s *liveSecrets) removeParts(ctx context.Context, namespace string) error {
	existing, err := s.parts.list(ctx, namespace)
	if err != nil {
		return err
	}
	return s.parts.prune(ctx, namespace, existing, nil, true)
}

// forget removes the data about a namespace without a live config.
func (s *liveSecrets) forget(namespace string) {
	s.budget.forget(namespace)
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.written, namespace)
}

// namespaces returns the namespaces with a live config.
func (s *liveSecrets) namespaces() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Keys(s.written))
}

// expired returns the write keys whose reservation has ended, by namespace.
func (s *liveSecrets) expired(now time.Time) map[string][]string {
	s.mu.Lock()
	defer s.mu.Unlock()
	ended := map[string][]string{}
	for namespace, secret := range s.written {
		if hashes := secret.history.Expired(now); len(hashes) > 0 {
			ended[namespace] = hashes
		}
	}
	return ended
}

// isLive reports whether a Secret is the namespace's live config with this content.
func isLive(s *corev1.Secret, namespace string, data map[string][]byte, revision string) bool {
	_, labelled := s.Labels[liveconfig.LabelLive]
	return labelled && s.Labels[liveconfig.LabelNamespace] == namespace && s.Annotations[liveconfig.AnnotationRevision] == revision &&
		maps.EqualFunc(s.Data, data, bytes.Equal)
}

// notOwnWrite accepts every change of a Secret, except for this process's own writes
// of a live config. It accepts every deletion, because the resource version of a
// deleted Secret may be the one of the last write.
func (s *liveSecrets) notOwnWrite() predicate.Predicate {
	foreign := func(o client.Object) bool {
		if o.GetNamespace() != s.release || s.parts.verified(o.GetName(), o.GetResourceVersion()) {
			return o.GetNamespace() != s.release
		}
		namespace, ok := liveconfig.NamespaceOf(o.GetName())
		return !ok || !s.wrote(namespace, o.GetResourceVersion())
	}
	return predicate.Funcs{
		CreateFunc: func(e event.CreateEvent) bool { return foreign(e.Object) },
		UpdateFunc: func(e event.UpdateEvent) bool {
			return e.ObjectOld.GetResourceVersion() != e.ObjectNew.GetResourceVersion() && foreign(e.ObjectNew)
		},
	}
}

// wrote reports whether the last write of a live-config Secret had this version.
func (s *liveSecrets) wrote(namespace, resourceVersion string) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.written[namespace].resourceVersion == resourceVersion
}

// unsettled returns the namespaces whose live config may change because of the pods' reports. Of a
// namespace without a Secret it needs parked objects or reserved write keys: the pods report the number of a removed
// namespace for a long time.
func (s *liveSecrets) unsettled(pods []health.Pod, complete bool, now time.Time) (list []string) {
	s.mu.Lock()
	written := maps.Clone(s.written)
	s.mu.Unlock()
	for namespace, secret := range written {
		history, d := secret.history, dispatchersOf(pods, complete, namespace)
		if !history.Settled(d, now) || history.Confirmed(d) && s.parts.supersededIn(namespace) {
			list = append(list, namespace)
		}
	}
	for _, pod := range pods {
		report := pod.Report
		if pod.Absent {
			report = pod.Configs
		}
		if report == nil {
			continue
		}
		for _, n := range report.Configs {
			reserves := func() bool {
				return compile.DispatchersOf(compile.Reports{Unready: []adminapi.ConfigReport{n}}).Reserves(now)
			}
			if _, known := written[n.Namespace]; !known && (len(n.Parked) > 0 || reserves()) && !slices.Contains(list, n.Namespace) {
				list = append(list, n.Namespace)
			}
		}
	}
	return list
}
