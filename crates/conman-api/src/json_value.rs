//! JSON as this API accepts it: no duplicate names in an object, a bounded number of values, and
//! whole numbers in any notation (`5`, `5.0`, `5e0`), as in JSON Schema.

use std::cell::Cell;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

/// Most values in a body, including nested ones. The largest valid request has fewer than 2,000.
/// Without a bound, a body of small values takes 20 times its size in memory.
const MAX_VALUES: usize = 16_384;

/// Whole numbers up to here are exact as doubles.
const MAX_EXACT: f64 = 9_007_199_254_740_992.0;

/// Reads the one value in `bytes`.
pub(crate) fn parse(bytes: &[u8]) -> Result<Value, serde_json::Error> {
    let mut deserializer = serde_json::Deserializer::from_slice(bytes);
    let values = Cell::new(0);
    let value = Strict { values: &values }.deserialize(&mut deserializer)?;
    deserializer.end()?;
    Ok(value)
}

#[derive(Clone, Copy)]
struct Strict<'a> {
    /// How many values were read so far.
    values: &'a Cell<usize>,
}

impl<'de> DeserializeSeed<'de> for Strict<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        let values = self.values.get() + 1;
        if values > MAX_VALUES {
            return Err(D::Error::custom(format!(
                "must have at most {MAX_VALUES} values"
            )));
        }
        self.values.set(values);
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Strict<'_> {
    type Value = Value;

    fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(Value::Number(value.into()))
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(Value::Number(value.into()))
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        if value.fract() == 0.0 && value.abs() <= MAX_EXACT {
            return Ok(Value::Number((value as i64).into()));
        }
        Ok(Number::from_f64(value).map_or(Value::Null, Value::Number))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(Value::String(value.to_owned()))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<Value, A::Error> {
        let mut items = Vec::new();
        while let Some(item) = sequence.next_element_seed(self)? {
            items.push(item);
        }
        Ok(Value::Array(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut object: A) -> Result<Value, A::Error> {
        let mut fields = Map::new();
        while let Some(name) = object.next_key::<String>()? {
            if fields.contains_key(&name) {
                return Err(A::Error::custom(format!("duplicate field `{name}`")));
            }
            let value = object.next_value_seed(self)?;
            fields.insert(name, value);
        }
        Ok(Value::Object(fields))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn whole_numbers_are_whole_however_they_are_written() {
        let value = parse(b"[5, 5.0, 5e0, -0.0, 5.5, 1e300, 18446744073709551615]").expect("JSON");
        assert_eq!(value, json!([5, 5, 5, 0, 5.5, 1e300, u64::MAX]));
    }

    #[test]
    fn a_name_that_stands_twice_is_refused_at_every_depth() {
        for json in [
            r#"{"a":1,"a":1}"#,
            r#"{"b":[{"a":1,"a":2}]}"#,
            r#"{"a":1,"\u0061":2}"#,
        ] {
            let error = parse(json.as_bytes()).expect_err(json);
            assert!(error.to_string().contains("duplicate field `a`"), "{error}");
        }
    }

    #[test]
    fn many_small_values_are_refused() {
        let json = format!("[{}0]", "0,".repeat(MAX_VALUES));
        assert!(parse(json.as_bytes()).expect_err("many").is_data());
        let json = format!("[{}0]", "0,".repeat(MAX_VALUES - 2));
        assert!(parse(json.as_bytes()).is_ok());
    }
}
