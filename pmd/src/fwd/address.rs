//! Addresses of devices: `SCHEME:PATH[,KEY[=VALUE]]…`.

use std::fmt;
use std::str::FromStr;

/// One kind of device, and the keys its addresses may carry.
struct Scheme {
    name: &'static str,
    keys: &'static [Key],
}

/// A key: a flag, or a number with its least and greatest value.
struct Key {
    name: &'static str,
    number: Option<(u32, u32)>,
}

const fn flag(name: &'static str) -> Key {
    Key { name, number: None }
}

const fn number(name: &'static str, min: u32, max: u32) -> Key {
    Key { name, number: Some((min, max)) }
}

/// Every scheme there is. Which of them a program opens is up to the program.
const SCHEMES: [Scheme; 2] = [
    Scheme {
        name: "virtio-user",
        keys: &[
            number("queues", 1, 128),
            number("size", 2, 32768),
            flag("packed"),
            flag("in_order"),
            flag("event_idx"),
            flag("mrg"),
            flag("server"),
        ],
    },
    Scheme { name: "vhost-user", keys: &[number("queues", 1, 128), flag("client")] },
];

/// Descriptors of a queue if the address names no number.
const SIZE_DEFAULT: u16 = 1024;

/// The address of a device, checked against the table of schemes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Address {
    text: String,
    scheme: &'static str,
    path: String,
    keys: Vec<(&'static str, u32)>,
}

/// Why a text is no address.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AddressError {
    /// It does not begin with a known scheme and a colon.
    #[error("address {text} does not begin with a scheme; write SCHEME:PATH, SCHEME being one of {known}")]
    Scheme {
        /// The address.
        text: String,
        /// The schemes there are.
        known: String,
    },
    /// Nothing stands behind the colon.
    #[error("address {text} has no path; write {scheme}:PATH")]
    NoPath {
        /// The address.
        text: String,
        /// Its scheme.
        scheme: &'static str,
    },
    /// A key that the scheme does not have.
    #[error("address {text}: {scheme} has no key {key}; it takes {known}")]
    Key {
        /// The address.
        text: String,
        /// Its scheme.
        scheme: &'static str,
        /// The key.
        key: String,
        /// The keys there are.
        known: String,
    },
    /// A key that stands there twice.
    #[error("address {text}: {key} is given twice; give it once")]
    Twice {
        /// The address.
        text: String,
        /// The key.
        key: &'static str,
    },
    /// A value that the key does not take, or none where it needs one.
    #[error("address {text}: {given} is not possible; write {wanted}")]
    Value {
        /// The address.
        text: String,
        /// What stands there.
        given: String,
        /// What may stand there.
        wanted: String,
    },
}

impl Address {
    /// The kind of device.
    #[must_use]
    pub fn scheme(&self) -> &'static str {
        self.scheme
    }

    /// Where it is; what that means is up to the scheme.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.path
    }

    /// Whether the flag `key` is there.
    #[must_use]
    pub fn flag(&self, key: &str) -> bool {
        self.number(key).is_some()
    }

    /// Queue pairs: `queues`, or 1.
    #[must_use]
    pub fn queues(&self) -> u16 {
        self.number("queues").map_or(1, |queues| queues as u16)
    }

    /// Descriptors of each queue: `size`, or 1024.
    #[must_use]
    pub fn size(&self) -> u16 {
        self.number("size").map_or(SIZE_DEFAULT, |size| size as u16)
    }

    /// The number that `key` has, if it is there.
    #[must_use]
    pub fn number(&self, key: &str) -> Option<u32> {
        self.keys.iter().find(|(name, _)| *name == key).map(|(_, value)| *value)
    }
}

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(text: &str) -> Result<Self, AddressError> {
        let own = || text.to_owned();
        let (name, rest) = text.split_once(':').unwrap_or((text, ""));
        let Some(scheme) = SCHEMES.iter().find(|scheme| text.contains(':') && scheme.name == name) else {
            let known = SCHEMES.map(|scheme| scheme.name).join(", ");
            return Err(AddressError::Scheme { text: own(), known });
        };
        let mut parts = rest.split(',');
        let path = parts.next().unwrap_or_default().to_owned();
        if path.is_empty() {
            return Err(AddressError::NoPath { text: own(), scheme: scheme.name });
        }
        let mut keys = Vec::new();
        for part in parts {
            let (key, value) = part.split_once('=').map_or((part, None), |(key, value)| (key, Some(value)));
            let Some(key) = scheme.keys.iter().find(|known| known.name == key) else {
                let known = scheme.keys.iter().map(Key::to_string).collect::<Vec<_>>().join(", ");
                return Err(AddressError::Key { text: own(), scheme: scheme.name, key: key.to_owned(), known });
            };
            if keys.iter().any(|(name, _)| *name == key.name) {
                return Err(AddressError::Twice { text: own(), key: key.name });
            }
            let Some(value) = key.parse(value) else {
                return Err(AddressError::Value { text: own(), given: part.to_owned(), wanted: key.to_string() });
            };
            keys.push((key.name, value));
        }
        Ok(Self { text: own(), scheme: scheme.name, path, keys })
    }
}

impl Key {
    /// What `value` means for this key; a flag that is there is 1.
    fn parse(&self, value: Option<&str>) -> Option<u32> {
        match (self.number, value) {
            (None, None) => Some(1),
            (Some((min, max)), Some(value)) => value.parse().ok().filter(|n| (min..=max).contains(n)),
            _ => None,
        }
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.number {
            None => f.write_str(self.name),
            Some((min, max)) => write!(f, "{}={min}..={max}", self.name),
        }
    }
}

impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_a_scheme_a_path_and_keys() {
        let address: Address = "virtio-user:/run/a:b.sock,queues=3,size=256,mrg".parse().unwrap();
        assert_eq!((address.scheme(), address.path()), ("virtio-user", "/run/a:b.sock"));
        assert_eq!((address.queues(), address.size()), (3, 256));
        assert_eq!((address.flag("mrg"), address.flag("packed")), (true, false));
        let short: Address = "vhost-user:s".parse().unwrap();
        assert_eq!((short.queues(), short.size(), short.number("size")), (1, 1024, None));
        assert_eq!(address.to_string(), "virtio-user:/run/a:b.sock,queues=3,size=256,mrg");
    }

    #[test]
    fn what_is_no_address_gets_one_sentence_that_says_what_is() {
        let keys = "queues=1..=128, size=2..=32768, packed, in_order, event_idx, mrg, server";
        let schemes = "does not begin with a scheme; write SCHEME:PATH, SCHEME being one of virtio-user, vhost-user";
        for (text, problem) in [
            ("", format!("address  {schemes}")),
            ("virtio-user", format!("address virtio-user {schemes}")),
            ("tcp:1234", format!("address tcp:1234 {schemes}")),
            ("vhost-user:", "address vhost-user: has no path; write vhost-user:PATH".into()),
            ("virtio-user:,mrg", "address virtio-user:,mrg has no path; write virtio-user:PATH".into()),
            ("virtio-user:s,fast", format!("address virtio-user:s,fast: virtio-user has no key fast; it takes {keys}")),
            ("virtio-user:s,", format!("address virtio-user:s,: virtio-user has no key ; it takes {keys}")),
            ("virtio-user:s,mrg,mrg", "address virtio-user:s,mrg,mrg: mrg is given twice; give it once".into()),
            ("virtio-user:s,mrg=1", "address virtio-user:s,mrg=1: mrg=1 is not possible; write mrg".into()),
            ("virtio-user:s,size", "address virtio-user:s,size: size is not possible; write size=2..=32768".into()),
            (
                "vhost-user:s,queues=0",
                "address vhost-user:s,queues=0: queues=0 is not possible; write queues=1..=128".into(),
            ),
            (
                "vhost-user:s,queues=x",
                "address vhost-user:s,queues=x: queues=x is not possible; write queues=1..=128".into(),
            ),
        ] {
            assert_eq!(text.parse::<Address>().unwrap_err().to_string(), problem);
        }
    }
}
