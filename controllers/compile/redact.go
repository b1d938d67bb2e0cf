package compile

import (
	"strings"

	"github.com/posthorn/posthorn/api/v1beta1"
	"github.com/posthorn/posthorn/contract/liveconfig"
	"github.com/posthorn/posthorn/contract/liveconfig/redact"
)

// minHashKeyBytes is the length of a key from which it cannot be guessed.
const minHashKeyBytes = 16

// redact returns the rules of redaction. An invalid rule is a problem, which pauses the destination; what is shown of its
// dead letters is then masked.
func (b *builder) redact(r *v1beta1.Redact, deletions v1beta1.DeletionPolicy) *liveconfig.Redact {
	const field = "spec.redact"
	if r == nil {
		return nil
	}
	c := &liveconfig.Redact{Allow: texts(r.Allow), Drop: texts(r.Drop), Mask: texts(r.Mask)}
	if r.Hash != nil {
		c.Hash = &liveconfig.RedactHash{Key: b.hashKey(field+".hash.secretKeyRef", r.Hash.SecretKeyRef)}
		for _, p := range r.Hash.Paths {
			switch p.Normalize {
			case "", v1beta1.NormalizeNone, v1beta1.NormalizeEmail:
			default:
				b.add(v1beta1.ReasonInvalidSpec, field+".hash.paths", "normalize %q is unknown; use %s or %s", p.Normalize,
					v1beta1.NormalizeEmail, v1beta1.NormalizeNone)
			}
			c.Hash.Paths = append(c.Hash.Paths, liveconfig.HashedPath{Path: string(p.Path), Email: p.Normalize == v1beta1.NormalizeEmail})
		}
	}
	redactor, err := redact.New(c)
	switch {
	case err != nil:
		b.add(v1beta1.ReasonInvalidSpec, field, "%s", strings.ReplaceAll(err.Error(), "\n", "; "))
	case len(redactor.Paths()) == 0:
		b.add(v1beta1.ReasonInvalidSpec, field, "set at least one of allow, drop, mask and hash, or leave redact out")
	case deletions != v1beta1.IgnoreDeletions && !redactor.NotifiesUser():
		b.add(v1beta1.ReasonInvalidSpec, field, "removes userId, so that the receiver cannot act on the notifications of DeletionRequests; hash userId, which gives notifications the pseudonym of the calls, or set spec.deletions to %s", v1beta1.IgnoreDeletions)
	default:
		return c
	}
	return &liveconfig.Redact{Mask: []string{"*"}}
}

func texts(paths []v1beta1.RedactPath) (out []string) {
	for _, path := range paths {
		out = append(out, string(path))
	}
	return out
}

// hashKey returns the key of pseudonyms.
func (b *builder) hashKey(field string, ref v1beta1.SecretKeyReference) liveconfig.Secret {
	value, ok := b.text(field, ref)
	if ok && (len(value) < minHashKeyBytes || len(value) > maxSharedSecretBytes) {
		b.add(v1beta1.ReasonInvalidSecret, field, "key %q of Secret %q has %d bytes; use %d to %d random ones", ref.Key, ref.Name, len(value),
			minHashKeyBytes, maxSharedSecretBytes)
		return liveconfig.Secret{}
	}
	return liveconfig.NewSecret(value)
}
